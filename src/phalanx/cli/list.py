"""`phalanx list`: the models on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from phalanx.catalog.local_models import LocalModel, local_models
from phalanx.cli.fitting_table import FittingTable, print_table
from phalanx.cli.terminal import show_json
from phalanx.errors import ExitCode
from phalanx.memory import GB, MIB
from phalanx.text.printable import printable


def command(as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> int:
    """List the models of the hub's cache, imported ones, and those that come with phalanx or in a package."""
    found = list(local_models())
    if as_json:
        plain = [{**msgspec.to_builtins(model, enc_hook=str), "fits": model.fits} for model in found]
        show_json(plain)
        return ExitCode.OK
    columns = ("NAME", "SIZE", "FAMILY", "BITS", "CONTEXT", "LAST USED", "FITS HERE", "")
    table = FittingTable(*columns, keys=("NAME",), texts=("",))
    for model in found:
        table.add_row(*map(Text, map(printable, _row(model))))
    print_table(table)
    return ExitCode.OK


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Print a table without lines, for people and for `cut`; nothing is wrapped or coloured."""
    shown = [[printable(" ".join(cell.split())) for cell in row] for row in rows]  # no cell begins a row of its own
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def size_of(n_bytes: int) -> str:
    """Bytes in words."""
    return f"{n_bytes / GB:.1f} GiB" if n_bytes >= GB else f"{n_bytes / MIB:.0f} MiB"


def day_of(seconds: float) -> str:
    """The local day of a time since 1970; "-" for none."""
    return time.strftime("%Y-%m-%d", time.localtime(seconds)) if seconds else "-"


def fits_here(model: LocalModel) -> str:
    """Whether the model can be served here, in a word."""
    return "yes" if model.fits and not model.lacks else "no"


def _row(model: LocalModel) -> list[str]:
    context, used = str(model.context or "-"), day_of(model.used)
    remark = f"not whole: phalanx pull {model.name}" if model.lacks else ""
    size, family, bits = size_of(model.bytes), model.family or "-", model.bits or "-"
    return [model.name, size, family, bits, context, used, fits_here(model), remark]
