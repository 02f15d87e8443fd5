"""The job of `kvplan kernel-bench`: are the paged-attention kernels right, and how near the memory's bandwidth?

Four modes. With a GPU kernels are validated, and those that are valid timed; ``validate`` leaves the timing out.
Without one ``compile`` has NVRTC compile them and says what they take, and ``emulate`` runs the same source on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvplan.errors import InputError, unknown_name

if TYPE_CHECKING:
    from kvplan.kernels.device import Device
    from kvplan.kernels.variants import Variant

Mode = Literal["time", "validate", "compile", "emulate"]
KERNELS = ("naive", "split", "mma")
#: What `--against` may name, each with the package that must be importable.
RIVALS = {"flashinfer": "flashinfer", "torch": "torch", "flash-attn": "flash_attn", "vllm": "vllm"}
#: Products of a query head with a key that the emulator works off in a minute or two (0.1 to 0.3 million a second).
MOST_EMULATED_PAIRS = 20_000_000

Progress = Callable[[int, int, str], None]


class Shape(NamedTuple):
    """One layer's decode attention: ``batch`` sequences of ``seq`` tokens each; heads of ``head_dim`` elements."""

    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    kv_cache_dtype: str

    @property
    def kv_bytes(self) -> int:
        """Keys and values of all live tokens."""
        return 2 * self.batch * self.seq * self.kv_heads * self.head_dim * _ELEMENT_BYTES[self.kv_cache_dtype]

    @property
    def bytes_moved(self) -> int:
        """What the kernel has to read and write at least: keys, values, query, output and block table, once each."""
        rows = 2 * self.batch * self.heads * self.head_dim * _ELEMENT_BYTES[self.dtype]
        return self.kv_bytes + rows + 4 * self.batch * -(-self.seq // self.block_size)


_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1}
_DTYPES = {"float": "float32", "half": "float16", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


@dataclass(slots=True, kw_only=True)
class KernelBenchOptions:
    """Options of `kernel-bench`; those of a shape take several values, whose product is swept.

    ``arch`` are compute capabilities times ten, for ``compile_only``. ``step`` times one decode step of a whole
    ``model``.
    """

    dtype: tuple[str, ...] = ()
    kv_cache_dtype: tuple[str, ...] = ()
    heads: tuple[int, ...] = ()
    kv_heads: tuple[int, ...] = ()
    head_dim: tuple[int, ...] = ()
    block_size: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()
    seq: tuple[int, ...] = ()
    model: str | None = None
    models: str | None = None
    tensor_parallel_size: int = 1
    kernel: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    arch: tuple[int, ...] = ()
    validate_only: bool = False
    compile_only: bool = False
    emulate: bool = False
    step: bool = False

    @property
    def mode(self) -> Mode:
        """What to do. Raises `InputError` where two things are asked for."""
        asked = [name for name in ("validate_only", "compile_only", "emulate") if getattr(self, name)]
        if len(asked) > 1:
            flags = [f"--{name.replace('_', '-')}" for name in asked]
            raise InputError(f"{' and '.join(flags)} exclude each other", where=flags[1], hint="give one of them")
        modes: dict[str, Mode] = {"validate_only": "validate", "compile_only": "compile", "emulate": "emulate"}
        return modes[asked[0]] if asked else "time"


class Spread(NamedTuple):
    """Seconds of one launch: percentiles over the repeats."""

    p10: float
    p50: float
    p90: float


@dataclass(frozen=True, slots=True)
class KernelResult:
    """A kernel on a shape. Errors are against float64; those of a timed shape are of some of its sequences.

    ``case`` names what was validated. What was not timed has None. ``copy_bytes_per_s`` counts bytes read and bytes
    written, as the kernel's own rate does; ``bandwidth_share`` is of the datasheet's figure, ``copy_share`` of that
    copy.
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
    max_abs_error: float | None
    max_rel_error: float | None
    tolerance: dict[str, float] | None
    valid: bool
    error: str | None = None
    time_s: Spread | None = None
    bytes_moved: int | None = None
    achieved_bytes_per_s: float | None = None
    copy_bytes_per_s: float | None = None
    bandwidth_share: float | None = None
    copy_share: float | None = None

    def to_dict(self) -> dict[str, object]:
        """A row of ``results``."""
        return {**asdict(self), "time_s": None if self.time_s is None else self.time_s._asdict()}


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A variant compiled for an architecture: what each thread takes, and whether that is within its budget."""

    kernel: str
    variant: str
    arch: int
    registers: int
    register_budget: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    cubin_bytes: int
    compiler: str

    @property
    def is_good(self) -> bool:
        """Nothing spills, and as many blocks fit on a multiprocessor as planned."""
        return self.spill_bytes == 0 and self.registers <= self.register_budget


class Skipped(NamedTuple):
    """What was asked for and not done, and why."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class StepTime:
    """One decode step's attention over all layers of a model, beside what the simulator's model of time says.

    ``predicted_s`` is None where the GPU is not in the catalogue.
    """

    model: str
    num_layers: int
    batch: int
    seq: int
    kernel: str
    time_s: Spread
    predicted_s: float | None
    bytes_moved: int


@dataclass(frozen=True, slots=True)
class KernelBenchResult:
    """What `kernel-bench` found."""

    mode: Mode
    device: Device | None
    results: tuple[KernelResult, ...] = ()
    compiled: tuple[CompiledKernel, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    step: StepTime | None = None
    warnings: tuple[str, ...] = field(default=())

    @property
    def is_good(self) -> bool:
        """Whether every kernel is valid, or within its budget where it was compiled only."""
        return all(row.valid for row in self.results) and all(row.is_good for row in self.compiled)

    def to_dict(self) -> dict[str, object]:
        """The JSON document without its version keys."""
        return {
            "mode": self.mode,
            "device": None if self.device is None else self.device.to_dict(),
            "results": [row.to_dict() for row in self.results],
            "compiled": [{**asdict(row), "within_budget": row.is_good} for row in self.compiled],
            "skipped": [row._asdict() for row in self.skipped],
            "step": None
            if self.step is None
            else {**asdict(self.step), "time_s": self.step.time_s._asdict()},
            "warnings": list(self.warnings),
        }


def kernel_bench(*, progress: Progress | None = None, **options: object) -> KernelBenchResult:
    """Validate and time the paged-attention kernels, or compile or emulate them without a GPU.

    ``options`` are the fields of `KernelBenchOptions`. Raises `InputError` for wrong options and ``CudaMissing`` where
    a GPU, its driver, CuPy or NVRTC is needed and missing.
    """
    chosen = KernelBenchOptions()
    for name, value in options.items():
        if name not in KernelBenchOptions.__slots__:
            raise unknown_name("option", name, KernelBenchOptions.__slots__)
        is_swept = isinstance(getattr(chosen, name), tuple)
        several = tuple(value) if isinstance(value, list | tuple) else (value,)
        setattr(chosen, name, several if is_swept else value)
    return kernel_bench_with(chosen, progress)


def kernel_bench_with(options: KernelBenchOptions, progress: Progress | None = None) -> KernelBenchResult:
    """The same with an options object."""
    _check(options)
    mode = options.mode
    shapes = shapes_of(options)
    if mode == "compile":
        return _compile(options, shapes, progress)
    if mode == "emulate":
        return _emulate(options, shapes, progress)
    from kvplan.kernels.gpu_bench import bench_on_gpu

    return bench_on_gpu(options, shapes, progress)


def _check(options: KernelBenchOptions) -> None:
    for name in options.kernel:
        if name not in (*KERNELS, "all"):
            raise unknown_name("kernel", name, (*KERNELS, "all"), where="--kernel")
    for name in options.against:
        if name not in RIVALS:
            raise unknown_name("library", name, RIVALS, where="--against")
    if options.arch and not options.compile_only:
        raise InputError("--arch has no effect on a run", where="--arch", hint="give --compile-only")
    if options.against and options.mode != "time":
        raise InputError("--against compares times", where="--against", hint="leave it out")
    if options.step and (options.model is None or options.mode != "time"):
        raise InputError(
            "--step times a step of a model", where="--step", hint="give --model, and no mode without a GPU"
        )


def shapes_of(options: KernelBenchOptions) -> tuple[Shape, ...]:
    """The product of what was given, over the shape of the model, over the defaults. Raises `InputError`."""
    own = ((32,), (8,), (128,)) if options.model is None else _of_model(options)
    heads, kv_heads, head_dims = (
        given or ours
        for given, ours in zip((options.heads, options.kv_heads, options.head_dim), own, strict=True)
    )
    if options.heads and not options.kv_heads and options.model is None:
        kv_heads = ()  # as many as query heads
    found = []
    for batch, seq, n, head_dim, block_size, dtype, stored in product(
        options.batch or (32,),
        options.seq or (4096,),
        heads,
        head_dims,
        options.block_size or (16,),
        options.dtype or ("bfloat16",),
        options.kv_cache_dtype or ("auto",),
    ):
        for kv in kv_heads or (n,):
            kept = _dtype(dtype, "--dtype")
            cache = kept if stored == "auto" else _dtype(stored, "--kv-cache-dtype")
            found.append(_sound(Shape(batch, seq, n, kv, head_dim, block_size, kept, cache)))
    return tuple(found)


def _dtype(name: str, where: str) -> str:
    if where == "--kv-cache-dtype" and name in ("fp8", "fp8_e4m3"):
        return "fp8_e4m3"
    known = _DTYPES.get(name, name)
    if known not in ("float32", "float16", "bfloat16"):
        raise unknown_name("dtype", name, ("float32", "float16", "bfloat16", "fp8_e4m3", "auto"), where=where)
    return known


def _sound(shape: Shape) -> Shape:
    from kvplan.kernels.variants import BLOCK_SIZES, HEAD_DIMS

    for name in ("batch", "seq", "heads", "kv_heads"):
        if not 1 <= getattr(shape, name) <= 10**8:
            raise InputError(
                f"{getattr(shape, name)} is out of range",
                where=f"--{name.replace('_', '-')}",
                hint="write a number from 1 to 100,000,000",
            )
    if shape.heads % shape.kv_heads:
        raise InputError(
            f"{shape.heads} query heads cannot share {shape.kv_heads} KV heads evenly",
            where="--kv-heads",
            hint="give a divisor of --heads",
        )
    for name, known in (("head_dim", HEAD_DIMS), ("block_size", BLOCK_SIZES)):
        if getattr(shape, name) not in known:
            raise InputError(
                f"no kernel has {name} {getattr(shape, name)}",
                where=f"--{name.replace('_', '-')}",
                hint=f"there are {', '.join(map(str, known))}",
            )
    return shape


def _of_model(options: KernelBenchOptions) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Heads, KV heads and head sizes of a model's attention on one rank, of its most common kind of layer."""
    from kvplan.config import load_model
    from kvplan.core.kv_cache import FullAttention, SlidingWindow

    assert options.model is not None, "the caller asks"
    catalogue = Path(options.models) if options.models is not None else None
    spec = load_model(options.model, catalogue=catalogue, where="--model")
    kinds = [
        (layers, cache) for cache, layers in spec.attention if isinstance(cache, FullAttention | SlidingWindow)
    ]
    if not kinds:
        named = ", ".join(dict.fromkeys(cache.kind for cache, _ in spec.attention))
        raise InputError(
            f"{spec.name} keeps its tokens as {named}",
            where="--model",
            hint="the kernels are for keys and values of heads; give --heads, --kv-heads and --head-dim",
        )
    _, cache = max(kinds, key=lambda kind: kind[0])
    tp = options.tensor_parallel_size
    if spec.num_heads % tp:
        raise InputError(
            f"{spec.num_heads} query heads cannot be split over {tp} ranks",
            where="--tensor-parallel-size",
            hint="give a divisor",
        )
    return (spec.num_heads // tp,), (max(1, cache.num_kv_heads // tp),), (cache.head_dim,)


def variants_of(
    options: KernelBenchOptions, shapes: Sequence[Shape], *, architecture: int = 80
) -> tuple[list[tuple[Shape, Variant]], list[Skipped]]:
    """Which kernel runs which shape, and what no kernel of the asked kind is made for."""
    from kvplan.kernels.variants import attention_variant

    pairs, skipped = [], []
    named = KERNELS if not options.kernel or "all" in options.kernel else options.kernel
    for shape, kernel in product(shapes, named):
        try:
            variant = attention_variant(
                kernel,
                head_dim=shape.head_dim,
                group=shape.heads // shape.kv_heads,
                dtype=shape.dtype,
                kv_cache_dtype=shape.kv_cache_dtype,
                architecture=architecture,
            )
        except InputError as error:
            skipped.append(Skipped(f"{kernel}, head_dim {shape.head_dim}, {shape.dtype}", error.what))
        else:
            pairs.append((shape, variant))
    if not pairs:
        raise InputError("no kernel is made for this", where="--kernel", hint=skipped[0].reason)
    return pairs, list(dict.fromkeys(skipped))


def _with_companions(pairs: Sequence[tuple[Shape, Variant]]) -> Iterator[Variant]:
    """The kernels of the shapes, and what merges their parts and writes their caches."""
    from kvplan.kernels.variants import Variant, merge_variant

    for _, variant in pairs:
        yield variant
        if variant.kernel != "naive":
            yield merge_variant(variant)
        yield Variant("reshape_and_cache", variant.head_dim, variant.dtype, variant.kv_cache_dtype)
    yield Variant("copy_blocks")


def _compile(
    options: KernelBenchOptions, shapes: Sequence[Shape], progress: Progress | None
) -> KernelBenchResult:
    from kvplan.kernels.nvrtc import architectures, compile_variant

    known = architectures()
    for arch in options.arch:
        if arch not in known:
            raise InputError(
                f"sm_{arch} is none that these kernels and this NVRTC know",
                where="--arch",
                hint=f"there are {', '.join(map(str, known))}",
            )
    pairs, skipped = variants_of(options, shapes)
    variants = list(dict.fromkeys(_with_companions(pairs)))
    todo = [(variant, arch) for arch in options.arch or known for variant in variants if variant.runs_on(arch)]
    rows = []
    for number, (variant, arch) in enumerate(todo):
        if progress is not None:
            progress(number, len(todo), f"{variant.name} for sm_{arch}")
        compiled = compile_variant(variant, arch)
        rows.append(
            CompiledKernel(
                variant.kernel,
                variant.name,
                arch,
                compiled.registers,
                variant.register_budget,
                compiled.spill_bytes,
                compiled.stack_bytes,
                compiled.static_shared_bytes + variant.shared_bytes(),
                len(compiled.cubin),
                compiled.compiler,
            )
        )
    return KernelBenchResult("compile", None, compiled=tuple(rows), skipped=tuple(skipped))


def _emulate(
    options: KernelBenchOptions, shapes: Sequence[Shape], progress: Progress | None
) -> KernelBenchResult:
    """Every kernel on the fixed cases, or, where a batch or a length was given, on the shapes themselves."""
    from kvplan.kernels.cases import CASES, Case
    from kvplan.kernels.emulation.validate import validate_emulated

    pairs, skipped = variants_of(options, shapes)
    if options.batch or options.seq:
        work = sum(shape.batch * shape.seq * shape.heads for shape, _ in pairs)
        if work > MOST_EMULATED_PAIRS:
            raise InputError(
                f"{work:,} products of a query head with a key take too long on a CPU",
                where="--emulate",
                hint=f"give a smaller --batch or --seq: at most {MOST_EMULATED_PAIRS:,}",
            )
        jobs = [
            (
                variant,
                Case(
                    "as asked",
                    (shape.seq,) * shape.batch,
                    group=shape.heads // shape.kv_heads,
                    num_kv_heads=shape.kv_heads,
                    block_size=shape.block_size,
                ),
            )
            for shape, variant in pairs
        ]
        emulated = [row for variant, case in jobs for row in validate_emulated([variant], [case], progress)]
    else:
        emulated = validate_emulated(
            [v for v in dict.fromkeys(_with_companions(pairs)) if v.kernel != "merge"], CASES, progress
        )
    results = tuple(
        KernelResult(
            kernel=row.kernel,
            variant=row.variant,
            case=row.case,
            batch=row.batch,
            seq=row.seq,
            heads=row.heads,
            kv_heads=row.kv_heads,
            head_dim=row.head_dim,
            block_size=row.block_size,
            dtype=row.dtype,
            kv_cache_dtype=row.kv_cache_dtype,
            max_abs_error=_finite(row.max_abs_error),
            max_rel_error=_finite(row.max_rel_error),
            tolerance=dict(row.tolerance) or None,
            valid=row.valid,
            error=row.error,
        )
        for row in emulated
    )
    return KernelBenchResult("emulate", None, results, skipped=tuple(skipped))


def _finite(error: float) -> float | None:
    """None where no number came out."""
    return error if error < float("inf") else None
