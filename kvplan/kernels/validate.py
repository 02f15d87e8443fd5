"""Every variant on every case: what `kvplan kernel-bench` shows of them, on a GPU or emulated on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, Protocol

from kvplan.kernels.cache_cases import CacheProblem, copy_problem, reshape_problem
from kvplan.kernels.cases import CASES, OUTPUTS, Case, Problem, Verdict, problem
from kvplan.kernels.emulation.build import Sanitizer, Source, executable
from kvplan.kernels.emulation.emulate import Order, Outcome, run
from kvplan.kernels.variants import Variant, kernel_source, with_merges

Progress = Callable[[int, int, str], None]  # done, of how many, what is next
#: Variants in one program: half the time of building each alone, and not long without news.
_BUILT_TOGETHER = 8
_LAYOUTS: tuple[Literal["NHD", "HND"], ...] = ("NHD", "HND")
_SCALES: tuple[Literal["none", "tensor", "head"], ...] = ("none", "tensor", "head")


@dataclass(frozen=True)
class CaseResult:
    """What a variant gave for a case.

    Where the launch was ended or the result is no number, errors are infinite and ``error`` says why. Kernels that
    write the cache are held to every byte; their ``batch`` is tokens or pairs of blocks, and ``seq`` is 0.
    """

    kernel: str
    variant: str
    case: str
    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    kv_cache_dtype: str
    max_abs_error: float
    max_rel_error: float
    valid: bool
    error: str | None = None
    tolerance: dict[str, float] = field(default_factory=dict)


class Solver(Protocol):
    """What runs the launches of problems: the emulator, or a GPU."""

    def build(self, variants: Sequence[Variant], /) -> Any:
        """A program with the variants, and the merges that they need."""

    def attend(self, program: Any, posed: Problem, /, *, order: Order) -> Outcome:
        """Solve a problem of attention."""

    def write(self, program: Any, posed: CacheProblem, /, *, order: Order) -> Outcome:
        """Solve a problem of writing the cache."""


@dataclass(frozen=True)
class Emulator:
    """How problems are solved: which source (the shipped one, or a text in its place), its macros, and what watches.

    Building raises ``NoCompiler`` and ``BuildFailed``.
    """

    source: str | None = None
    sanitizer: Sanitizer = Sanitizer.NONE
    defines: tuple[tuple[str, str], ...] = ()

    def build(self, variants: Sequence[Variant]) -> Path:
        """A program with the variants and the merges that they need."""
        needed = with_merges(variants)
        text = (self.source or kernel_source()) + "\n" + "".join(one.instance for one in needed)
        named = Source("paged_attention.cu", text, tuple(one.name for one in needed), self.defines)
        return executable([named], self.sanitizer)

    def attend(
        self, program: Path, posed: Problem, *, order: Order = Order.FORWARD, traffic: bool = False
    ) -> Outcome:
        """Solve a problem of attention."""
        outputs = [name for name in OUTPUTS if name in posed.arrays]
        return run(program, posed.launches, posed.arrays, outputs, order=order, traffic=traffic)

    def write(self, program: Path, posed: CacheProblem, *, order: Order = Order.FORWARD) -> Outcome:
        """Solve a problem of writing the cache."""
        return run(
            *(program, [posed.launch], posed.arrays, list(posed.expected)),
            addresses=posed.addresses,
            order=order,
        )


def validate(
    variants: Sequence[Variant],
    cases: Sequence[Case] = CASES,
    progress: Progress | None = None,
    *,
    solver: Solver | None = None,
) -> Iterator[CaseResult]:
    """Each variant on each case that is for it, compared with float64 or byte by byte.

    The emulator solves them unless another solver is given; cases take turns with its order of threads. ``merge`` has
    no case: it is part of those of split and mma. Raises what the solver's ``build`` does: ``NoCompiler`` and
    ``BuildFailed``, or ``CudaMissing`` and ``CompilationFailed``.
    """
    solver = solver or Emulator()
    tell = progress or (lambda done, total, name: None)
    tasks = [(variant, task) for variant in variants for task in _tasks(variant, cases)]
    programs: dict[Variant, Any] = {}
    for number, (variant, task) in enumerate(tasks):
        tell(number, len(tasks), variant.name)
        if variant not in programs:
            at = variants.index(variant)
            together = variants[at : at + _BUILT_TOGETHER]
            programs |= dict.fromkeys(together, solver.build(together))
        yield task(solver, programs[variant], list(Order)[number % len(Order)])
    tell(len(tasks), len(tasks), "")


_Task = Callable[[Solver, Any, Order], CaseResult]


def _tasks(variant: Variant, cases: Sequence[Case]) -> list[_Task]:
    match variant.kernel:
        case "merge":
            return []
        case "reshape_and_cache":
            scales = _SCALES if variant.kv_cache_dtype == "fp8_e4m3" else _SCALES[:1]
            return [partial(_reshaped, variant, *one) for one in product(_LAYOUTS, (1, 16), scales)]
        case "copy_blocks":
            return [partial(_copied, variant, block_bytes) for block_bytes in (16, 2064, 65536)]
        case _:
            return [partial(_attended, variant, one) for one in cases]


def _attended(variant: Variant, case: Case, solver: Solver, program: Any, order: Order) -> CaseResult:
    posed = problem(variant, case)
    outcome = solver.attend(program, posed, order=order)
    failed = Verdict(math.inf, math.inf, {}, valid=False)
    verdict = posed.judge(outcome.outputs) if outcome.error is None else failed
    return CaseResult(
        kernel=variant.kernel,
        variant=variant.name,
        case=case.name,
        batch=len(case.context_lens),
        seq=max(case.context_lens),
        heads=case.num_kv_heads * case.group,
        kv_heads=case.num_kv_heads,
        head_dim=variant.head_dim,
        block_size=case.block_size,
        dtype=variant.dtype,
        kv_cache_dtype=variant.kv_cache_dtype,
        max_abs_error=verdict.max_abs_error,
        max_rel_error=verdict.max_rel_error,
        valid=verdict.valid and not outcome.reports,
        error=_said(outcome),
        tolerance=dict(verdict.tolerance),
    )


def _reshaped(
    variant: Variant,
    layout: Literal["NHD", "HND"],
    block_size: int,
    scales: Literal["none", "tensor", "head"],
    solver: Solver,
    program: Any,
    order: Order,
) -> CaseResult:
    posed = reshape_problem(variant, layout=layout, block_size=block_size, scales=scales)
    name = f"{layout}, blocks of {block_size}, scales: {scales}"
    return _written(posed, name, solver.write(program, posed, order=order), block_size)


def _copied(variant: Variant, block_bytes: int, solver: Solver, program: Any, order: Order) -> CaseResult:
    posed = copy_problem(variant, block_bytes=block_bytes)
    name = f"blocks of {block_bytes} bytes in all layers"
    return _written(posed, name, solver.write(program, posed, order=order), 0)


def _written(posed: CacheProblem, name: str, outcome: Outcome, block_size: int) -> CaseResult:
    variant, kv_heads = posed.variant, getattr(posed.launch.arguments, "num_kv_heads", 0)
    wrong = posed.wrong_bytes(outcome.outputs) if outcome.error is None else 0
    right = outcome.error is None and wrong == 0
    return CaseResult(
        kernel=variant.kernel,
        variant=variant.name,
        case=name,
        batch=posed.launch.grid[0],
        seq=0,
        heads=kv_heads,
        kv_heads=kv_heads,
        head_dim=variant.head_dim,
        block_size=block_size,
        dtype=variant.dtype,
        kv_cache_dtype=variant.kv_cache_dtype,
        max_abs_error=0.0 if right else math.inf,
        max_rel_error=0.0 if right else math.inf,
        valid=right and not outcome.reports,
        error=_said(outcome) or (f"{wrong} bytes of the caches are wrong" if wrong else None),
    )


def _said(outcome: Outcome) -> str | None:
    texts = [outcome.error, *(f"{one.tool}: {one.kind}, lines {one.lines}" for one in outcome.reports)]
    return next((text for text in texts if text), None)
