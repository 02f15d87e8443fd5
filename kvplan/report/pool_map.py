"""The pool of one step as rows of characters, with what they mean, and a block table."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich.text import Text

from kvplan.drawing import CACHED, FREE, SHARED, draw_pool
from kvplan.report.tables import Screen, new_table
from kvplan.text import literal
from kvplan.units import format_seconds

if TYPE_CHECKING:
    from kvplan.core.pool_map import PoolMap
    from kvplan.drawing import PoolDrawing


#: Rows of a map, requests in its legend and stretches of a block table.
_MAP_ROWS = 20
_MAP_REQUESTS = 12
_TABLE_RUNS = 30

#: Colours of letters, one after the other; what they say is said by the letters too.
_LETTER_STYLES = ("cyan", "green", "yellow", "magenta", "blue", "red")


def print_map(screen: Screen, pool: PoolMap) -> None:
    """Who holds which cell of the pool in one step."""
    when = "" if pool.time_s is None else f", {format_seconds(pool.time_s)}"
    screen.console.print()
    screen.say(f"The pool in step {pool.step:,}{when}", style="bold")
    print_grid(screen, pool)


def print_grid(screen: Screen, pool: PoolMap) -> None:
    """The cells, what the characters mean, and the block table where one was asked for."""
    unit = "block" if pool.cell_tokens > 1 else "slot"
    label = len(f"{pool.num_cells:,}")
    drawing = draw_pool(pool, max(8, min(64, screen.console.width - label - 3)), _MAP_ROWS)
    each = f"{drawing.per_mark} {unit}s" if drawing.per_mark > 1 else f"a {unit}"
    size = f" of {pool.cell_tokens} tokens" if pool.cell_tokens > 1 else ""
    screen.say(f"{pool.num_cells:,} {unit}s{size}, a character is {each}", style="dim")
    for row in drawing.rows:
        line = Text(f" {row.first:>{label},} ", style="dim")
        for mark, marks in groupby(row.marks):
            line.append("".join(marks), style=mark_style(mark))
        screen.console.print(line)
        if row.alike:
            screen.say(f" {'':>{label}} {row.alike:,} more rows of the same", style="dim")
    _map_legend(screen, pool, drawing, unit)
    if pool.table_of is not None:
        _block_table(screen, pool, unit)


def _map_legend(screen: Screen, pool: PoolMap, drawing: PoolDrawing, unit: str) -> None:
    table = new_table("", f"{unit}s", "shared", "tokens", "")
    table.columns[-1].justify = "left"
    shown = [one for one in pool.requests if one.id in drawing.letters]
    listed = sorted(shown, key=lambda one: -one.cells)[:_MAP_REQUESTS]
    for one in shown:
        if one in listed:
            mark = drawing.letters[one.id]
            name = Text(mark, style=mark_style(mark))
            if one.id != mark:
                name.append(f" {literal(one.id)}", style="default")
            shared = f"{one.shared_cells:,}"
            table.add_row(name, f"{one.cells:,}", shared, f"{one.tokens:,}", "")
    rest = len(pool.requests) - len(listed)
    if rest:
        held = sum(one.cells for one in pool.requests) - sum(one.cells for one in listed)
        tokens = sum(one.tokens for one in pool.requests) - sum(one.tokens for one in listed)
        table.add_row(f"{rest:,} more requests", f"{held:,}", "", f"{tokens:,}", "other letters, +")
    reserved = "lower case, -: no token in them yet"
    for mark, state, what in (
        (" ", "held", "upper case, +: one request has them"),
        (" ", "reserved", reserved),
        (SHARED, "shared", "used by several requests"),
        (CACHED, "cached", "free, and reusable"),
        (FREE, "free", "free, and empty"),
    ):
        count = next(n for name, n in pool.cells.items() if name == state)
        if count:
            table.add_row(Text(f"{mark} {state}", style="dim"), f"{count:,}", "", "", what)
    screen.console.print(table)


def _block_table(screen: Screen, pool: PoolMap, unit: str) -> None:
    screen.say(f"{'The block table' if unit == 'block' else 'The place'} of {literal(pool.table_of)}")
    table = new_table("logical", "physical", f"{unit}s", "tokens", "users")
    for run in pool.table[:_TABLE_RUNS]:
        table.add_row(
            _span(run.logical, run.cells),
            _span(run.physical, run.cells),
            f"{run.cells:,}",
            f"{run.tokens:,}",
            f"{run.users:,}",
        )
    screen.console.print(table)
    if len(pool.table) > _TABLE_RUNS:
        screen.say(f"and {len(pool.table) - _TABLE_RUNS:,} more stretches (--json has all)")


def mark_style(mark: str) -> str:
    """The colour of a character of a map."""
    if mark.isalpha():
        style = _LETTER_STYLES[(ord(mark.upper()) - ord("A")) % len(_LETTER_STYLES)]
        return style if mark.isupper() else f"dim {style}"
    return {SHARED: "bold white", CACHED: "bright_black", FREE: "bright_black"}.get(mark, "default")


def _span(first: int, count: int) -> str:
    return f"{first:,}" if count == 1 else f"{first:,} - {first + count - 1:,}"
