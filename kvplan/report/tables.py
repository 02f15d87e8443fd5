"""The terminal, and what the tables of all commands share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kvplan.text import literal
from kvplan.units import counted, format_bytes

if TYPE_CHECKING:
    from kvplan.options import Settings


_NARROWEST = 20
#: Longer words, such as paths, may be cut.
_LONGEST_WORD = 32


class Screen:
    """Standard output, as wide as the terminal. Tables fit 80 columns."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, markup=False, emoji=False)
        if self.console.width < _NARROWEST:  # some containers say COLUMNS=0
            self.console.width = 80

    def show(self, table: Table) -> None:
        """Print a table; where its words do not fit beside each other, row by row below each other.

        Rich shrinks the widest column first, into the middle of words. Here each column gets its longest word, and
        what is left is shared out evenly, the least lacking first.
        """
        columns = [[_plain(column.header), *map(_plain, column.cells)] for column in table.columns]
        lines = [max(map(cell_len, column)) for column in columns]
        least = [
            line if column.no_wrap else _longest_word(texts)
            for line, column, texts in zip(lines, table.columns, columns, strict=True)
        ]
        whole = Measurement.get(self.console, self.console.options.update_width(10_000), table).maximum
        spare = self.console.width - (whole - sum(lines)) - sum(least)
        if spare < 0:
            self._show_rows(columns)
            return
        by_lack = sorted(range(len(columns)), key=lambda i: lines[i] - least[i])
        for done, i in enumerate(by_lack):
            more = min(lines[i] - least[i], spare // (len(columns) - done))
            table.columns[i].width, spare = least[i] + more, spare - more
        self.console.print(table)

    def _show_rows(self, columns: Sequence[Sequence[str]]) -> None:
        """A table of texts, row by row: the first cell, and below it each other one with the name of its column."""
        names = [column[0] for column in columns]
        self.console.print()
        if names[0]:
            self.say(names[0], style="bold")
        for first, *cells in zip(*(column[1:] for column in columns), strict=True):
            self.say(first)
            for name, cell in zip(names[1:], cells, strict=True):
                if cell.strip():
                    self.say(f"  {name}: {cell}" if name and len(cells) > 1 else f"  {cell}")

    def say(self, text: str, *, style: str = "") -> None:
        """Print a line, wrapped where it is too long."""
        self.console.print(Text(text, style=style))


def new_table(*columns: str, keep_first: bool = False) -> Table:
    """An empty table with columns of these names: the first to the left, the others to the right."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for i, name in enumerate(columns):
        table.add_column(
            Text(name), justify="left" if i == 0 else "right", overflow="fold", no_wrap=i == 0 and keep_first
        )
    return table


def _plain(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)


def _longest_word(texts: Sequence[str]) -> int:
    return min(max((cell_len(word) for text in texts for word in text.split()), default=0), _LONGEST_WORD)


def gib(size: int | None) -> str:
    """Bytes in GiB."""
    return "unknown" if size is None else f"{size / (1 << 30):,.2f}"


def exact_bytes(size: int | None) -> str:
    """Every byte, and the same rounded."""
    return "unknown" if size is None else f"{size:,} B = {format_bytes(size)}"


def trace_line(trace: Mapping[str, object]) -> str:
    """The trace of a run and how many requests it has, of the ``trace`` block of its document."""
    requests = trace["requests"]
    assert isinstance(requests, int), "it is a count"
    return f"{literal(trace['path'])}: {counted(requests, 'request')}"


def value_of(settings: Settings, name: str) -> str:
    """The value of a setting, which is said to be assumed where nobody gave it."""
    return f"{literal(settings[name].value)}{'' if settings[name].given else ' (assumed)'}"
