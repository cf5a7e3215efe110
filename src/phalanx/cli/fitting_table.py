"""Tables for people that fit the terminal: a row is one line; where that is too narrow, long texts stand below."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions
from rich.text import Text

GAP = "  "  # between two columns
UNLIMITED = 1 << 30


class FittingTable:
    """A table for rich's consoles. Pipes get a row a line, however long (`print_table`).

    Args:
        columns: their headings.
        keys: headings of the columns that name a row.
        texts: headings of the columns that may be long.
    """

    def __init__(self, *columns: str, keys: Sequence[str], texts: Sequence[str] = ()) -> None:
        self._columns = columns
        self._keys = [columns.index(name) for name in keys]
        self._texts = [columns.index(name) for name in texts]
        self._rows: list[list[Text]] = []

    def add_row(self, *cells: str | Text) -> None:
        """Add a row; strings are rich's markup. Missing cells are empty."""
        row = [cell if isinstance(cell, Text) else Text.from_markup(cell) for cell in cells]
        self._rows.append([*row, *(Text() for _ in range(len(self._columns) - len(row)))])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        in_pipe = options.no_wrap and not console.is_terminal
        yield from self.lines(console, UNLIMITED if in_pipe else options.max_width)

    def lines(self, console: Console, width: int) -> Iterator[Text]:
        """The lines, none of them wider than the terminal but for what has no blank in it."""
        every = [*range(len(self._columns))]
        short = [column for column in every if column not in self._texts]
        others = [column for column in short if column not in self._keys]
        if self._width(every) <= width:
            yield from self._table([every])
            return
        if others or not self._texts:
            yield from self._table([short] if self._width(short) <= width else [self._keys, others])
        for row in self._rows:
            yield from self._below(row, console, width)

    def _width(self, columns: Sequence[int]) -> int:
        return sum(self._widths()[column] for column in columns) + len(GAP) * (len(columns) - 1)

    def _widths(self) -> list[int]:
        return [
            max([len(name), *(row[column].cell_len for row in self._rows)]) for column, name in enumerate(self._columns)
        ]

    def _table(self, groups: Sequence[Sequence[int]]) -> Iterator[Text]:
        """The rows, each on as many lines as there are groups of columns."""
        widths = self._widths()
        for row in [[Text(name, "bold") for name in self._columns], *self._rows]:
            for number, columns in enumerate(groups):
                line = Text(GAP * number, no_wrap=True, overflow="ignore")
                for column in columns:
                    line.append_text(row[column])
                    line.append(" " * (widths[column] - row[column].cell_len) + GAP)
                line.rstrip()
                yield line

    def _below(self, row: Sequence[Text], console: Console, width: int) -> Iterator[Text]:
        """The long texts of a row, after what names it."""
        filled = [column for column in self._texts if row[column]]
        name = Text(" ").join(row[column] for column in self._keys)
        for number, column in enumerate(filled):
            text, last = row[column], f"{row[self._keys[-1]].plain}: "
            if number:
                text = Text.assemble(f"{self._columns[column]}: ", text)
            else:  # many texts begin with the host's name
                text = Text.assemble(name, ": ", text[len(last) :] if text.plain.startswith(last) else text)
            for line_number, line in enumerate(_wrapped(text, width - len(GAP))):
                indent = "" if number == line_number == 0 else GAP
                yield Text.assemble(indent, line, no_wrap=True, overflow="ignore")


def _wrapped(text: Text, width: int) -> Iterator[Text]:
    """Lines of whole words: a command or a path can be copied."""
    line = Text()
    for word in text.split(" "):
        if line and line.cell_len + 1 + word.cell_len > width:
            yield line
            line = Text()
        line = Text.assemble(line, " ", word) if line else word
    yield line


def print_table(table: FittingTable) -> None:
    """Print on stdout."""
    size = shutil.get_terminal_size()
    Console(width=size.columns, height=size.lines).print(
        table, soft_wrap=True
    )  # rich takes a dumb terminal for 80 wide
