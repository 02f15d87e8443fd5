"""What `models` and `gpus` print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from kvplan.report.tables import Screen, new_table
from kvplan.text import literal
from kvplan.units import format_bytes, format_count

if TYPE_CHECKING:
    from kvplan.core.gpu import Gpu
    from kvplan.core.model import ModelSpec


def print_models(screen: Screen, models: Sequence[ModelSpec]) -> None:
    """The catalogue of models."""
    table = new_table(
        "model", "10^9 params", "layers", "KV heads", "max tokens", "attention", keep_first=True
    )
    table.columns[-1].justify = "left"
    for m in models:
        parameters = m.weights.parameters
        kinds: Counter[str] = Counter()
        for cache, count in m.attention:
            kinds[cache.kind.replace("_", " ")] += count
        table.add_row(
            literal(m.name),
            "unknown" if parameters is None else f"{parameters / 1e9:,.2f}",
            str(m.num_layers),
            f"{m.num_kv_heads} x {m.head_dim}",
            format_count(m.max_position_embeddings),
            ", ".join(kind if len(kinds) == 1 else f"{count} {kind}" for kind, count in kinds.items()),
        )
    screen.show(table)


def print_gpus(screen: Screen, gpus: Sequence[Gpu]) -> None:
    """The catalogue of GPUs."""
    table = new_table("GPU", "memory, GiB", "GB/s", "fp16 TFLOPS", "fp8 TFLOPS", "link GB/s")
    for g in gpus:
        table.add_row(
            g.name,
            _in_units(g.memory_bytes, 1 << 30, 2),
            _in_units(g.bandwidth_bytes_per_s, 10**9),
            _in_units(g.flops_fp16, 10**12),
            _in_units(g.flops_fp8, 10**12),
            _in_units(g.interconnect_bytes_per_s, 10**9),
        )
    screen.show(table)
    screen.say("Dense tensor-core rates; the link counts both directions; ? is unknown.")


def print_record(screen: Screen, fields: dict[str, object]) -> None:
    """One catalogue entry, a line a field; of a block of fields those that are known."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _lines(fields):
        if name.endswith("_bytes") and isinstance(value, int):
            text = f"{value:,} ({format_bytes(value)})"
        elif isinstance(value, int) and not isinstance(value, bool):
            text = f"{value:,}"
        elif isinstance(value, list):
            text = ", ".join(_flat(item) for item in value) or "-"
        else:
            text = "unknown" if value is None else str(value)
        table.add_row(name, literal(text))
    screen.show(table)


def _lines(fields: dict[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            known = [f"{key} {item}" for key, item in value.items() if item is not None]
            yield from zip([name, *[""] * len(known)], known or ["-"], strict=False)
        else:
            yield name, value


def _flat(item: object) -> str:
    return " ".join(f"{k} {v}" for k, v in item.items()) if isinstance(item, dict) else str(item)


def _in_units(value: int | None, unit: int, digits: int = 0) -> str:
    return "?" if value is None else f"{value / unit:,.{digits}f}"
