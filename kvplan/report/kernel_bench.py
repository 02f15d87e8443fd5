"""What `kernel-bench` prints: which kernels are right, what they take, how near the bandwidth they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from kvplan.report.tables import Screen, new_table
from kvplan.text import literal
from kvplan.units import counted, format_bytes, format_seconds, format_share

if TYPE_CHECKING:
    from kvplan.jobs.kernel_bench import CompiledKernel, KernelBenchResult, KernelResult, StepTime

_BAR_CELLS = 40
_VALID = {True: "yes", False: "NO", None: "-"}


def print_kernel_bench(screen: Screen, result: KernelBenchResult) -> None:
    """What was done, on what, and what came out."""
    screen.say(_assumptions(result), style="dim")
    screen.say(_headline(result))
    if result.compiled:
        _print_compiled(screen, result.compiled)
    if result.results:
        if result.mode == "time":
            _print_timed(screen, result.results)
        else:
            _print_validated(screen, result.results)
    if result.step is not None:
        _print_step(screen, result.step)
    for skipped in result.skipped:
        screen.say(f"left out: {literal(skipped.what)}: {literal(skipped.reason)}")
    judged = [row for row in (*result.results, *result.validation) if row.valid is not None]
    wrong = [row for row in judged if not row.valid]
    for row in wrong:
        what = literal(row.error or _off(row))
        screen.say(f"{row.variant} is wrong on {literal(row.case)}: {what}", style="bold red")
    if judged:
        screen.say(f"{len(judged) - len(wrong):,} of {counted(len(judged), 'result')} valid, against float64")
    if any(row.valid is None for row in result.results):
        screen.say("what other libraries compute was not validated: their rows are times alone")
    if result.is_partial:
        screen.say("interrupted: this is what was finished")


def _assumptions(result: KernelBenchResult) -> str:
    """What nobody gave, of what matters: seeded cases have lengths and blocks of their own."""
    unused = set() if result.device is not None else {"batch", "seq", "block_size"}
    assumed = [
        f"{name} {', '.join(map(str, values))}"
        for name, (values, _, given) in result.config.items()
        if not given and name not in unused and isinstance(values, list)
    ]
    return f"assumed: {'; '.join(assumed)}" if assumed else "nothing assumed"


def _headline(result: KernelBenchResult) -> str:
    device = result.device
    if device is not None:
        return (
            f"{literal(device.name)}: sm_{device.arch}, {device.num_sms} multiprocessors, "
            f"{format_bytes(device.memory_bytes)}; CUDA {device.driver_cuda} (driver), {device.cupy_cuda} (CuPy)"
        )
    if result.mode == "compile":
        return "compiled by NVRTC for GPUs that are not here: nothing ran"
    return "emulated on the CPU: the same source, right or wrong, but no times"


def _print_compiled(screen: Screen, rows: Sequence[CompiledKernel]) -> None:
    table = new_table("kernel", "arch", "registers", "spilled", "shared", "code")
    for row in rows:
        table.add_row(
            row.variant.removeprefix("kvplan_"),
            f"sm_{row.arch}",
            f"{row.registers} of {row.register_budget}",
            Text(f"{row.spill_bytes} B", style="" if row.is_good else "bold red"),
            format_bytes(row.shared_bytes),
            f"{row.cubin_bytes / 1024:.0f} KiB",
        )
    screen.show(table)
    good = sum(row.is_good for row in rows)
    screen.say(f"{good:,} of {len(rows):,} within their registers, without spills ({rows[0].compiler})")


def _print_validated(screen: Screen, rows: Sequence[KernelResult]) -> None:
    """A row a variant, with its worst case."""
    table = new_table("kernel", "cases", "valid", "largest error", "of what is allowed", "in")
    for variant in dict.fromkeys(row.variant for row in rows):
        own = [row for row in rows if row.variant == variant]
        worst = max(own, key=lambda row: float("inf") if not row.valid else _used(row))
        valid = sum(row.valid is True for row in own)
        table.add_row(
            variant.removeprefix("kvplan_"),
            str(len(own)),
            Text(str(valid), style="" if valid == len(own) else "bold red"),
            "-" if worst.max_abs_error is None else f"{worst.max_abs_error:.2e}",
            format_share(_used(worst)) if worst.tolerance else "every byte",
            literal(worst.case),
        )
    screen.show(table)


def _print_timed(screen: Screen, rows: Sequence[KernelResult]) -> None:
    """A table a shape, then all that was achieved as bars, by the bytes that have to be moved."""
    for shape in dict.fromkeys(row.shape for row in rows):
        moved = f"{shape}; at least {format_bytes(shape.bytes_moved)} moved"
        screen.say(moved)
        table = new_table("kernel", "p10", "p50", "p90", "achieved", "datasheet", "copy", "valid")
        for row in rows:
            if row.shape == shape:
                table.add_row(row.kernel, *_timed_cells(row))
        screen.show(table)
    for copy in sorted({row.copy_bytes_per_s for row in rows if row.copy_bytes_per_s is not None}):
        screen.say(f"a plain copy in this GPU's memory: {copy / 1e9:,.0f} GB/s, read and written counted")
    for row in sorted(rows, key=lambda row: row.bytes_moved or 0):
        share, of = row.bandwidth_share, "datasheet"
        if share is None:
            share, of = row.copy_share, "copy"
        if share is not None and row.bytes_moved is not None:
            cells = "█" * round(_BAR_CELLS * min(share, 1))
            what = f"{row.kernel}, {format_bytes(row.bytes_moved)}"
            screen.say(f"{cells:░<{_BAR_CELLS}} {format_share(share)} of {of}: {what}")


def _timed_cells(row: KernelResult) -> list[str | Text]:
    spread = row.time_s
    times = (None, None, None) if spread is None else spread
    achieved = row.achieved_bytes_per_s
    return [
        *map(format_seconds, times),
        "-" if achieved is None else f"{achieved / 1e9:,.0f} GB/s",
        format_share(row.bandwidth_share),
        format_share(row.copy_share),
        Text(_VALID[row.valid], style="bold red" if row.valid is False else ""),
    ]


def _print_step(screen: Screen, step: StepTime) -> None:
    line = (
        f"a decode step of {literal(step.model)}, {counted(step.batch, 'sequence')} of {counted(step.seq, 'token')}: "
        f"attention of {counted(step.num_layers, 'layer')} by {step.kernel} takes {format_seconds(step.time_s.p50)}"
    )
    if step.predicted_s is None:
        screen.say(f"{line}; the simulator does not know this GPU")
    else:
        share = step.time_s.p50 / step.predicted_s
        screen.say(f"{line}; the simulator reckons with {format_seconds(step.predicted_s)} (x {share:.2f})")


def _used(row: KernelResult) -> float:
    return 0.0 if row.tolerance is None else row.tolerance.get("used", 0.0)


def _off(row: KernelResult) -> str:
    return f"off by {row.max_abs_error:.3g}" if row.max_abs_error is not None else "no number came out"
