"""Chooses which lines of its ranks' logs the supervisor prints: each error once, and the details of a good start only
with `--log-level debug`.

Every rank of a group logs the error that ends it, and the errors of the others. The supervisor holds an error until the
group has ended, and then prints it once: in full in the reason of that end, or alone. Pure.
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
DETAIL = re.compile(
    r"rank \d+: (joining \d+ ranks |rank \d+ \([^()]*\) on .* connected from |joined in \d|stage \d+, the last is "
    r"|before loading:$|loading \d|loaded in \d|up to \d\S* GiB of weights |\S.*: model type "
    r"|kernels: (native: |MLX computes )|self-test passed )"
)
"""Details of a start, from one rank or from each."""
SUMMARY = re.compile(r"rank 0: context \d+ tokens; ")
"""The result of a good start."""
DEBUG, INFO = 10, 20  # as in `logging`
LEFT_OUT = {DEBUG: DETAIL, INFO: SUMMARY}
"""Level -> lines that are printed at this level and below."""
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
        level: as in `logging`. DEBUG prints all, INFO the summary of a start without its details, WARNING neither.
    """

    def __init__(self, level: int = DEBUG) -> None:
        self._left_out = [pattern for least, pattern in LEFT_OUT.items() if level > least]
        self._errors: list[tuple[str, list[str]]] = []  # the name and the message's lines of each
        self._reports: set[str] = set()
        self._open: dict[str, list[str]] = {}  # process -> the held or hidden entry that its indented lines belong to
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
        if any(pattern.match(line) for pattern in self._left_out):
            self._open[process] = []
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
