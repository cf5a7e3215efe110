"""Tables on terminals of 300, 80 and 60 columns, and in pipes: no line is wider, no word is cut, nothing is lost."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys

import pytest
from rich.console import Console

from phalanx.cli.clusters import check_results_table, status_table
from phalanx.cli.fitting_table import FittingTable
from phalanx.cli.install import show
from phalanx.cluster.check_results import bad, warning
from phalanx.cluster.host_status import HostStatus
from phalanx.errors import ClusterError
from phalanx.memory import GB

ONE, OTHER = "studio1.local", "studio2.local"
LONG_LINE = (
    "rank 0: loading 12.00 GiB of weights from /Users/someone/.cache/hub/models--mlx-community--Qwen3-30B (4bit)"
)
RUNNING = HostStatus(
    host=ONE, role="server", child=12345, supervisor=1, rss=40 * GB, used=100 * GB, physical=128 * GB,
    last_line=LONG_LINE,
)  # fmt: skip
AWAY = ClusterError(f"{OTHER}: ssh failed (`phalanx host status`): Connection timed out", remedy="Try it by hand.")
RESULTS = {
    ONE: [bad("memory", "21.1 GiB available", "54.3 GiB for the shard", "Use more machines, or a smaller model.")],
    OTHER: [
        warning("phalanx", "0.0.9", "0.1.0", f"`phalanx install --upgrade {OTHER},{ONE}` brings the same version.")
    ],
}


def installed() -> FittingTable:
    table = FittingTable("host", "python", "phalanx", "says", keys=("host",), texts=("says",))
    table.add_row(
        ONE, "3.12.4", "0.1.0-0123456789ab", "installed; no native kernels: models compute several times slower"
    )
    table.add_row(OTHER, "", "", "[red]It has Python 3.9.18; phalanx needs Python 3.11 or newer. Install one there.[/]")
    return table


def models() -> FittingTable:
    table = FittingTable("NAME", "SIZE", "FAMILY", "CONTEXT", "LAST USED", "FITS HERE", "", keys=("NAME",), texts=("",))
    name = "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit"
    table.add_row(name, "4.2 GiB", "llama", "131072", "2026-11-29", "no", f"not whole: phalanx pull {name}")
    table.add_row("demo", "8 MiB", "qwen3", "4096", "2026-11-29", "yes", "")
    return table


TABLES = {
    "status": lambda: status_table({ONE: RUNNING, OTHER: AWAY, "c": HostStatus(host="c")}),
    "doctor": lambda: check_results_table(RESULTS, all_levels=False),
    "install": installed,
    "list": models,
}


def lines(table: FittingTable, width: int | None) -> list[str]:
    """What a terminal of this width gets; None: a pipe."""
    out = Console(file=io.StringIO(), width=width or 80, force_terminal=width is not None, color_system=None)
    out.print(table, soft_wrap=True)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("name", TABLES)
def test_a_narrow_terminal_gets_whole_words_and_all_of_them(name: str, width: int):
    table = TABLES[name]()
    shown, whole = lines(table, width), lines(table, None)
    assert max(map(len, shown)) <= width
    said = set(" ".join(shown).replace(":", " ").split())
    assert said >= set(" ".join(whole[1:]).replace(":", " ").split())
    assert not any(line.endswith(" ") for line in shown)


@pytest.mark.parametrize("name", TABLES)
def test_a_pipe_and_a_wide_terminal_get_a_row_a_line(name: str):
    table = TABLES[name]()
    assert lines(table, None) == lines(table, 300) and len(lines(table, None)) == (4 if name == "status" else 3)


def test_long_texts_stand_below_the_table():
    assert lines(installed(), 60) == [
        "host           python  phalanx",
        "studio1.local  3.12.4  0.1.0-0123456789ab",
        "studio2.local",
        "studio1.local: installed; no native kernels: models",
        "  compute several times slower",
        "studio2.local: It has Python 3.9.18; phalanx needs Python",
        "  3.11 or newer. Install one there.",
    ]
    assert lines(TABLES["doctor"](), 60)[:4] == [
        "studio1.local memory: 21.1 GiB available",
        "  wanted: 54.3 GiB for the shard",
        "  remedy: Use more machines, or a smaller model.",
        "studio2.local phalanx: 0.0.9",
    ]
    assert lines(TABLES["status"](), 80)[4:6] == [
        "0 studio1.local: rank 0: loading 12.00 GiB of weights from",
        "  /Users/someone/.cache/hub/models--mlx-community--Qwen3-30B",
    ]


def test_a_table_of_short_cells_that_is_too_wide_has_two_lines_a_row():
    assert lines(models(), 60)[:4] == [
        "NAME",
        "  SIZE     FAMILY  CONTEXT  LAST USED   FITS HERE",
        "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit",
        "  4.2 GiB  llama   131072   2026-11-29  no",
    ]


ON_A_TERMINAL = """
from phalanx.cli.install import show
from phalanx.errors import ClusterError
show({"a": ClusterError("a: " + 12 * "no room ")})
"""


@pytest.mark.parametrize(
    ("variables", "codes"), [({}, {"1", "31", "0"}), ({"NO_COLOR": "1"}, {"1", "0"}), ({"TERM": "dumb"}, set())]
)
def test_colours_are_as_the_terminal_and_the_user_want_them(variables: dict[str, str], codes: set[str]):
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TTY_COMPATIBLE")}
    environment |= {"COLUMNS": "60", "TERM": "xterm", **variables}
    subprocess.run([sys.executable, "-c", ON_A_TERMINAL], stdout=theirs, env=environment, check=True)
    os.close(theirs)
    said = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert set(re.findall("\x1b\\[([0-9;]*)m", said)) == codes
    plain = re.sub("\x1b\\[[0-9;]*m", "", said).splitlines()
    assert plain[0] == "host  python  phalanx" and plain[2].startswith("a: no room ") and max(map(len, plain)) <= 60


def test_the_exit_code_of_a_failed_host(capsys: pytest.CaptureFixture[str]):
    assert show({"a": ("3.12.4", "0.1.0", "installed"), "b": ClusterError("b: The host is off.")}) == 1
    _, a, b = capsys.readouterr().out.splitlines()
    assert a.split() == ["a", "3.12.4", "0.1.0", "installed"] and b.split() == ["b", "The", "host", "is", "off."]
