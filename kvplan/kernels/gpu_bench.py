"""The kernels on the GPU that is here: validated on the seeded cases, then on each shape, and timed where valid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from kvplan.errors import InputError
from kvplan.jobs.kernel_bench import (
    KernelBenchOptions,
    KernelBenchResult,
    KernelResult,
    Progress,
    Skipped,
    Spread,
    StepTime,
    case_row,
    finite,
    predicted_step_s,
    step_layers,
    variants_of,
    with_companions,
)
from kvplan.kernels.cases import CASES, Case
from kvplan.kernels.device import Device, find_device
from kvplan.kernels.gpu_solver import GpuSolver, cuda_errors
from kvplan.kernels.rivals import RivalMissing, rival_calls
from kvplan.kernels.shape import Shape
from kvplan.kernels.timed_batch import NoRoom, TimedBatch, timed_batch
from kvplan.kernels.timing import Timer
from kvplan.kernels.validate import validate
from kvplan.kernels.variants import Variant, attention_variant


def bench_on_gpu(
    options: KernelBenchOptions,
    shapes: Sequence[Shape],
    progress: Progress | None = None,
    *,
    cases: Sequence[Case] = CASES,
) -> KernelBenchResult:
    """Validate the kernels of the shapes, then time those that are valid; an interrupt gives what was finished.

    Raises `CudaMissing` without a GPU, and `InputError` where no kernel is made for a shape.
    """
    bench = _Bench(find_device(), options, progress or (lambda done, total, what: None), cases)
    try:
        if options.step:
            bench.time_step()
        else:
            pairs, left_out = variants_of(options, shapes, architecture=bench.device.arch)
            bench.skipped += left_out
            bench.validate(with_companions(pairs))
            for shape in dict.fromkeys(shape for shape, _ in pairs):
                bench.run_shape(shape, [variant for one, variant in pairs if one == shape])
    except KeyboardInterrupt:
        bench.is_partial = True
    return bench.result()


@dataclass
class _Bench:
    """What is known so far. ``wrong`` has the first case that each wrong variant fails."""

    device: Device
    options: KernelBenchOptions
    progress: Progress
    cases: Sequence[Case]
    validation: list[KernelResult] = field(default_factory=list)
    rows: list[KernelResult] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    step: StepTime | None = None
    is_partial: bool = False
    wrong: dict[str, str] = field(default_factory=dict)
    _timer: Timer | None = None
    _copy_bytes_per_s: float | None = None

    def result(self) -> KernelBenchResult:
        """All rows; where nothing is timed the cases are results as well."""
        timed = self.options.mode == "time"
        return KernelBenchResult(
            self.options.mode,
            self.device,
            results=tuple(self.rows if timed else [*self.validation, *self.rows]),
            validation=tuple(self.validation if timed else ()),
            skipped=tuple(self.skipped),
            step=self.step,
            is_partial=self.is_partial,
        )

    def validate(self, variants: Iterable[Variant]) -> None:
        """Each variant on each seeded case."""
        for found in validate(
            list(dict.fromkeys(variants)), self.cases, self.progress, solver=GpuSolver(self.device)
        ):
            row = case_row(found)
            self.validation.append(row)
            if not row.valid:
                self.wrong.setdefault(row.variant, row.case)

    def run_shape(self, shape: Shape, variants: Sequence[Variant]) -> None:
        """Check the variants on a shape and, unless they are only validated, time the right ones and their rivals."""
        self.progress(0, 1, str(shape))
        timer = self.timer() if self.options.mode == "time" else None
        batch = self._batch(str(shape), lambda: timed_batch(shape, l2_cache_bytes=self.device.l2_cache_bytes))
        if batch is None:
            return
        for variant in variants:
            self._run_variant(batch, variant, timer)
        if timer is not None:
            for name in self.options.against:
                self._run_rival(batch, name, timer)
        self.progress(1, 1, "")

    def timer(self) -> Timer:
        """The one that all launches share; the copy is timed when it is made, while all memory is free."""
        if self._timer is None:
            self._timer = Timer(self.device)
            self._copy_bytes_per_s = self._timer.copy_bytes_per_s()
        return self._timer

    def _batch(self, what: str, make: Callable[[], TimedBatch]) -> TimedBatch | None:
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        try:
            return make()
        except NoRoom as error:
            self.skipped.append(Skipped(what, error.what))
        except cupy.cuda.memory.OutOfMemoryError as error:
            self.skipped.append(Skipped(what, f"out of memory: {error}"))
        return None

    def _run_variant(self, batch: TimedBatch, variant: Variant, timer: Timer | None) -> None:
        import cupy

        what = f"{variant.kernel}, {batch.shape}"
        try:
            self.rows.append(self._variant_row(batch, variant, timer))
        except InputError as error:  # such as scores of naive that do not fit shared memory
            self.skipped.append(Skipped(what, error.what))
        except cupy.cuda.memory.OutOfMemoryError as error:  # room for partial results
            self.skipped.append(Skipped(what, f"out of memory: {error}"))
        except cuda_errors() as error:
            self.rows.append(replace(_unknown(variant.kernel, variant.name, batch.shape), error=str(error)))

    def _variant_row(self, batch: TimedBatch, variant: Variant, timer: Timer | None) -> KernelResult:
        shape = batch.shape
        row = _unknown(variant.kernel, variant.name, shape)
        if variant.name in self.wrong:
            return replace(row, error=f"not run: wrong on {self.wrong[variant.name]}")
        launches = batch.attention(variant)
        verdict, error = batch.check(variant, launches[0])
        row = replace(
            row,
            max_abs_error=finite(verdict.max_abs_error),
            max_rel_error=finite(verdict.max_rel_error),
            tolerance={name: value for name, value in verdict.tolerance.items() if finite(value) is not None},
            valid=verdict.valid and error is None,
            error=error,
        )
        if timer is None or not row.valid:
            return row
        return self._timed(row, shape, timer.seconds([one.run for one in launches]))

    def _run_rival(self, batch: TimedBatch, name: str, timer: Timer) -> None:
        shape = batch.shape
        try:
            rival = rival_calls(name, batch)
            seconds = timer.seconds(rival.calls)
        except RivalMissing as error:
            self.skipped.append(Skipped(f"{name}, {shape}", error.what))
        # Somebody else's library may refuse a shape in its own way, and change its interface.
        except (RuntimeError, ValueError, TypeError, AttributeError, MemoryError) as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            self.skipped.append(Skipped(f"{name}, {shape}", reason[:300]))
        else:
            row = replace(_unknown(name, rival.version, shape), valid=None)
            self.rows.append(self._timed(row, shape, seconds))

    def _timed(self, row: KernelResult, shape: Shape, seconds: Sequence[float]) -> KernelResult:
        spread = spread_of(seconds)
        achieved = shape.bytes_moved / spread.p50
        datasheet, copy = self.device.bandwidth_bytes_per_s, self._copy_bytes_per_s
        return replace(
            row,
            time_s=spread,
            bytes_moved=shape.bytes_moved,
            achieved_bytes_per_s=achieved,
            copy_bytes_per_s=copy,
            bandwidth_share=achieved / datasheet if datasheet else None,
            copy_share=achieved / copy if copy else None,
        )

    def time_step(self) -> None:
        """The attention of all layers of the model, one after another, each with a cache of its own if they fit."""
        layers = step_layers(self.options)
        kernel = (
            self.options.kernel[0] if self.options.kernel and "all" not in self.options.kernel else "auto"
        )
        variants = [
            attention_variant(
                kernel,
                head_dim=one.shape.head_dim,
                group=one.shape.group,
                dtype=one.shape.dtype,
                kv_cache_dtype=one.shape.kv_cache_dtype,
                architecture=self.device.arch,
            )
            for one in layers
        ]
        self.validate(variants)
        timer = self.timer()
        total = sum(one.layers * one.shape.pool_bytes for one in layers)
        calls: list[Callable[[], None]] = []
        for one, variant in zip(layers, variants, strict=True):
            make = partial(
                timed_batch,
                one.shape,
                l2_cache_bytes=self.device.l2_cache_bytes,
                tables=one.layers,
                window=one.window,
                share=one.layers * one.shape.pool_bytes / total,
            )
            batch = self._batch(f"{one.layers} layers, {one.shape}", make)
            if batch is None:
                return
            row = self._variant_row(batch, variant, None)
            self.rows.append(row)
            if not row.valid:
                return
            launches = batch.attention(variant)
            calls += [launches[number % len(launches)].run for number in range(one.layers)]

        def step() -> None:
            for call in calls:
                call()

        shape = layers[0].shape
        self.step = StepTime(
            model=str(self.options.model),
            num_layers=len(calls),
            batch=shape.batch,
            seq=shape.seq,
            kernel=", ".join(dict.fromkeys(variant.kernel for variant in variants)),
            time_s=spread_of(timer.seconds([step])),
            predicted_s=predicted_step_s(self.options, self.device.gpu),
            bytes_moved=sum(one.layers * one.bytes_moved for one in layers),
        )


def _unknown(kernel: str, variant: str, shape: Shape) -> KernelResult:
    """A row of which nothing is known yet."""
    return KernelResult(kernel, variant, "as asked", *shape, None, None, None, valid=False)


def spread_of(seconds: Sequence[float]) -> Spread:
    """The 10th, 50th and 90th percentile, linear between repeats."""
    low, middle, high = (float(value) for value in np.percentile(np.asarray(seconds), [10, 50, 90]))
    return Spread(low, middle, high)
