"""What the supervisor prints of its ranks' logs: each error once, and of what each rank says alike only rank 0's lines.
Every rank of a group logs the error that ends it, and those of the others.

An error is held until its group has ended. Then it is in full in the reason of that end, or printed. Pure.
"""

from __future__ import annotations

import re

from phalanx import errors

NAMES = "|".join(
    name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.PhalanxError)
)
ERROR = re.compile(rf"rank \d+: (?:rank \d+ \([^()]*\) )?(?P<name>{NAMES}): (?P<message>.*)")
REPORT = re.compile(r"rank \d+: (?P<message>rank \d+ \([^()]*, pid \d+\) .*)")
"""A rank's line on another rank."""
ALIKE = re.compile(
    r"rank \d+: (joining \d+ ranks |rank \d+ \([^()]*\) on .* connected from )"
    r"|rank [1-9]\d*: (joined in \d|loading \d|loaded in \d)"
)
"""Lines of a start that goes well, one or more from each rank."""
SERVING = "rank 0: serving"
"""Rank 0's last line before it says that it is ready."""
SAME = 200  # characters by which errors are compared: ranks shorten those of others
DASHES = re.compile("-{20,}")
"""The first and the last line of a notice of mpirun."""
SAYS_NOTHING = "one or more processes exited with non-zero status"
"""In a notice: which ones and why, the ranks themselves have logged."""
MAX_NOTICE = 30  # lines


class RankLog:
    """The log of one start of a group.

    Args:
        verbose: print what all ranks say alike as well.
    """

    def __init__(self, *, verbose: bool = True) -> None:
        self._verbose = verbose
        self._errors: list[tuple[str, list[str]]] = []  # the name and the message's lines of each
        self._reports: set[str] = set()
        self._open: dict[str, list[str]] = {}  # process -> the error that its indented lines belong to
        self._notices: dict[str, list[str]] = {}  # process -> lines of a notice that has begun

    def admit(self, process: str, line: str) -> list[str]:
        """Take in a line. Returns the lines that are to be printed now."""
        if process in self._notices or DASHES.fullmatch(line):
            return self._in_notice(process, line)
        if line.startswith("  ") and process in self._open:
            self._open[process].append(line.removeprefix("  "))
            return []
        self._open.pop(process, None)
        if (error := ERROR.fullmatch(line)) is not None:
            lines = self._open[process] = [error["message"]]
            self._errors.append((error["name"], lines))
            return []
        if not self._verbose and ALIKE.match(line):
            return []
        report = REPORT.fullmatch(line)
        is_new = report is None or report["message"] not in self._reports
        if report is not None:
            self._reports.add(report["message"])
        return [line] if is_new else []

    def in_full(self, reason: str) -> str:
        """The reason of the group's end, with its error as the rank wrote it: by its name, which `faults` knows. That
        error counts as printed."""
        flat = _flat(reason)
        for name, lines in self._errors:
            if (same := _flat(lines)[:SAME]) in flat:
                self._errors = [other for other in self._errors if _flat(other[1])[:SAME] != same]
                before = flat[: flat.index(same)].removesuffix(f"{name}: ")
                return f"{before}{name}: " + "\n".join(lines)
        return reason

    def held(self) -> list[str]:
        """All lines that were held and are to be printed at the end."""
        once = {_flat(lines)[:SAME]: [f"{name}: {lines[0]}", *lines[1:]] for name, lines in reversed(self._errors)}
        found = [line for lines in (*reversed(once.values()), *self._notices.values()) for line in lines]
        self._errors.clear()
        self._notices.clear()
        return found

    def _in_notice(self, process: str, line: str) -> list[str]:
        notice = self._notices.setdefault(process, [])
        notice.append(line)
        is_whole = len(notice) > 1 and DASHES.fullmatch(line)
        if not is_whole and len(notice) < MAX_NOTICE:
            return []
        del self._notices[process]
        return [] if SAYS_NOTHING in " ".join(notice) else notice


def _flat(text: str | list[str]) -> str:
    return " ".join((text if isinstance(text, str) else " ".join(text)).split())
