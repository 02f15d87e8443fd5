"""The job of `kvplan kernel-bench`: are the paged-attention kernels right, and how near the memory's bandwidth?

Four modes. With a GPU kernels are validated, and those that are valid timed; ``validate`` leaves the timing out.
Without one ``compile`` has NVRTC compile them and says what they take, and ``emulate`` runs the same source on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvplan.errors import InputError, unknown_name
from kvplan.kernels.shape import Shape
from kvplan.options import Setting, Settings, flag, settings_dict

if TYPE_CHECKING:
    from kvplan.core.model import ModelSpec
    from kvplan.kernels.cases import Case
    from kvplan.kernels.device import Device
    from kvplan.kernels.nvrtc import Compiled
    from kvplan.kernels.validate import CaseResult
    from kvplan.kernels.variants import Variant

Mode = Literal["time", "validate", "compile", "emulate"]
KERNELS = ("naive", "split", "mma")
#: What `--against` may name.
RIVALS = ("flashinfer", "torch", "flash-attn", "vllm")
#: Products of a query head with a key that the emulator works off in a minute or two (0.1 to 0.3 million a second).
MOST_EMULATED_PAIRS = 20_000_000

Progress = Callable[[int, int, str], None]  # done, of how many, what is next

#: Modes that an option of their own asks for.
_MODES: dict[str, Mode] = {"validate_only": "validate", "compile_only": "compile", "emulate": "emulate"}
#: Other names of dtypes.
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
        asked = [name for name in _MODES if getattr(self, name)]
        if len(asked) > 1:
            flags = [flag(name) for name in asked]
            raise InputError(
                f"{' and '.join(flags)} exclude each other", where=flags[1], hint="give one of them"
            )
        return _MODES[asked[0]] if asked else "time"

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels that are asked for, as they are named; all of them where none or ``all`` is."""
        return KERNELS if not self.kernel or "all" in self.kernel else self.kernel


class Spread(NamedTuple):
    """Seconds of one launch: percentiles over the repeats."""

    p10: float
    p50: float
    p90: float


@dataclass(frozen=True, slots=True)
class KernelResult:
    """A kernel on a shape. Errors are against float64; those of a timed shape are of some of its sequences.

    Kernels of other libraries are not validated: their ``valid`` is None. ``case`` names what was validated. What was
    not timed has None. ``copy_bytes_per_s`` counts bytes read and bytes written, as the kernel's own rate does;
    ``bandwidth_share`` is of the datasheet's figure, ``copy_share`` of that copy.
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
    valid: bool | None
    error: str | None = None
    time_s: Spread | None = None
    bytes_moved: int | None = None
    achieved_bytes_per_s: float | None = None
    copy_bytes_per_s: float | None = None
    bandwidth_share: float | None = None
    copy_share: float | None = None

    @property
    def shape(self) -> Shape:
        """What it ran on."""
        return Shape(*(getattr(self, name) for name in Shape._fields))

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
    """What `kernel-bench` found.

    ``validation`` has the seeded cases that were tried before anything was timed; where nothing is timed they are the
    ``results``. ``is_partial``: an interrupt ended it.
    """

    mode: Mode
    device: Device | None
    results: tuple[KernelResult, ...] = ()
    validation: tuple[KernelResult, ...] = ()
    compiled: tuple[CompiledKernel, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    step: StepTime | None = None
    config: Settings = field(default_factory=dict)
    is_partial: bool = False

    @property
    def is_good(self) -> bool:
        """Whether every kernel is valid, or within its budget where it was compiled only."""
        judged = (*self.results, *self.validation)
        return all(row.valid is not False for row in judged) and all(row.is_good for row in self.compiled)

    def to_dict(self) -> dict[str, object]:
        """The JSON document without its version keys."""
        return {
            "mode": self.mode,
            "status": "interrupted" if self.is_partial else "done",
            "config": settings_dict(self.config),
            "device": None if self.device is None else self.device.to_dict(),
            "results": [row.to_dict() for row in self.results],
            "validation": [row.to_dict() for row in self.validation],
            "compiled": [{**asdict(row), "within_budget": row.is_good} for row in self.compiled],
            "skipped": [row._asdict() for row in self.skipped],
            "step": None
            if self.step is None
            else {**asdict(self.step), "time_s": self.step.time_s._asdict()},
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
    mode, shapes = options.mode, shapes_of(options)
    if mode == "compile":
        result = _compile(options, shapes, progress)
    elif mode == "emulate":
        result = _emulate(options, shapes, progress)
    else:
        from kvplan.kernels.gpu_bench import bench_on_gpu

        result = bench_on_gpu(options, shapes, progress)
    return replace(result, config=_settings(options, shapes))


def _settings(options: KernelBenchOptions, shapes: Sequence[Shape]) -> Settings:
    """What was tried, and where it came from."""
    found: Settings = {}
    for name in Shape._fields:
        values = list(dict.fromkeys(getattr(shape, name) for shape in shapes))
        of_model = options.model is not None and name in ("heads", "kv_heads", "head_dim")
        source = f"model {options.model}" if of_model else "default"
        given = bool(getattr(options, name))
        found[name] = Setting(values, flag(name) if given else source, given or of_model)
    kernels = [name for name in KERNELS if name in options.kernels]
    found["kernel"] = Setting(kernels, "--kernel" if options.kernel else "default", bool(options.kernel))
    tp = options.tensor_parallel_size
    found["tensor_parallel_size"] = Setting(tp, "default" if tp == 1 else "--tensor-parallel-size", tp > 1)
    return found


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
    if options.model is None and (options.models is not None or options.tensor_parallel_size != 1):
        where = "--models" if options.models is not None else "--tensor-parallel-size"
        raise InputError(
            f"{where} has no effect without a model", where=where, hint="give --model, or leave it out"
        )
    if options.step:
        _check_step(options)


def _check_step(options: KernelBenchOptions) -> None:
    if options.model is None or options.mode != "time":
        raise InputError(
            "--step times a step of a model", where="--step", hint="give --model, and no mode without a GPU"
        )
    for name in ("heads", "kv_heads", "head_dim", "against"):
        if getattr(options, name):
            raise InputError(f"{flag(name)} has no effect on a step", where=flag(name), hint="leave it out")
    for name in ("batch", "seq", "block_size", "dtype", "kv_cache_dtype", "kernel"):
        if len(getattr(options, name)) > 1:
            raise InputError("a step has one shape", where=flag(name), hint="give one value")


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
        more = ("fp8_e4m3", "auto") if where == "--kv-cache-dtype" else ()
        raise unknown_name("dtype", name, ("float32", "float16", "bfloat16", *more), where=where)
    return known


def _sound(shape: Shape) -> Shape:
    from kvplan.kernels.variants import BLOCK_SIZES, HEAD_DIMS

    for name in ("batch", "seq", "heads", "kv_heads"):
        if not 1 <= getattr(shape, name) <= 10**8:
            raise InputError(
                f"{getattr(shape, name)} is out of range",
                where=flag(name),
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
                where=flag(name),
                hint=f"there are {', '.join(map(str, known))}",
            )
    return shape


class LayerKind(NamedTuple):
    """Attention layers of a model that are alike, on one rank. ``window`` is 0 for none."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int
    layers: int


def _layer_kinds(options: KernelBenchOptions) -> list[LayerKind]:
    """The model's layers whose keys and values are of heads. Raises `InputError` where there are none."""
    from kvplan.core.kv_cache import FullAttention, SlidingWindow, kv_heads_per_rank

    spec, tp = _load(options), options.tensor_parallel_size
    if spec.num_heads % tp:
        raise InputError(
            f"{spec.num_heads} query heads cannot be split over {tp} ranks",
            where="--tensor-parallel-size",
            hint="give a divisor",
        )
    kinds = [
        LayerKind(
            spec.num_heads // tp,
            kv_heads_per_rank(cache.num_kv_heads, tp),
            cache.head_dim,
            cache.window or 0,
            layers,
        )
        for cache, layers in spec.attention
        if isinstance(cache, FullAttention | SlidingWindow)
    ]
    if not kinds or (options.step and len(kinds) < len(spec.attention)):
        named = ", ".join(dict.fromkeys(cache.kind for cache, _ in spec.attention))
        raise InputError(
            f"{spec.name} keeps its tokens as {named}",
            where="--model",
            hint="the kernels are for keys and values of heads; give --heads, --kv-heads and --head-dim",
        )
    return kinds


def _load(options: KernelBenchOptions) -> ModelSpec:
    from kvplan.config import load_model

    assert options.model is not None, "the caller asks"
    catalogue = Path(options.models) if options.models is not None else None
    return load_model(options.model, catalogue=catalogue, where="--model")


def _of_model(options: KernelBenchOptions) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Heads, KV heads and head sizes of a model's most common kind of attention layer."""
    kind = max(_layer_kinds(options), key=lambda kind: kind.layers)
    return (kind.heads,), (kind.kv_heads,), (kind.head_dim,)


class StepLayers(NamedTuple):
    """Layers of a step that are alike: the shape of one, its window (0 for none), and how many they are."""

    shape: Shape
    window: int
    layers: int

    @property
    def bytes_moved(self) -> int:
        """By one of them at least; a window leaves most of the keys and values out."""
        whole = self.shape.bytes_moved
        if not self.window:
            return whole
        attended = min(self.window, self.shape.seq)
        return whole - self.shape.kv_bytes + self.shape.kv_bytes // self.shape.seq * attended


def step_layers(options: KernelBenchOptions) -> list[StepLayers]:
    """The attention layers of a decode step of the model. Raises `InputError`."""
    template = shapes_of(options)[0]
    found = []
    for kind in _layer_kinds(options):
        shape = template._replace(heads=kind.heads, kv_heads=kind.kv_heads, head_dim=kind.head_dim)
        found.append(StepLayers(_sound(shape), kind.window, kind.layers))
    return found


def predicted_step_s(options: KernelBenchOptions, gpu_name: str | None) -> float | None:
    """What the model of step times says of the same: reading keys and values, or computing with them.

    None where the GPU is not in the catalogue, or its rates are not.
    """
    if gpu_name is None:
        return None
    from kvplan.config import load_gpu
    from kvplan.core.engine import StepWork
    from kvplan.options import Resolver, SizeOptions
    from kvplan.serving import serve
    from kvplan.step_time import latency_model

    spec, gpu, shape = _load(options), load_gpu(gpu_name), shapes_of(options)[0]
    if gpu.bandwidth_bytes_per_s is None or gpu.flops_fp16 is None:
        return None
    fp8 = shape.kv_cache_dtype == "fp8_e4m3"
    settings = SizeOptions.of(
        {
            "gpu": gpu.name,
            "tensor_parallel_size": options.tensor_parallel_size,
            "dtype": shape.dtype,
            "kv_cache_dtype": "fp8" if fp8 else "auto",
        }
    )
    served = serve(spec, Resolver(settings), gpu=gpu, gpu_count=options.tensor_parallel_size)
    cost, _ = latency_model(served)
    work = StepWork(decodes=shape.batch, decode_context=shape.batch * shape.seq, sampled=shape.batch)
    terms = [stage.terms(work) for stage in cost.stages]
    return sum(term["kv_bandwidth_share"] + term["attention_flops_share"] for term in terms)


def variants_of(
    options: KernelBenchOptions, shapes: Sequence[Shape], *, architecture: int = 80
) -> tuple[list[tuple[Shape, Variant]], list[Skipped]]:
    """Which kernel runs which shape, and what no kernel of the asked kind is made for."""
    from kvplan.kernels.variants import attention_variant

    pairs, skipped = [], []
    for shape, kernel in product(shapes, options.kernels):
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


def with_companions(pairs: Sequence[tuple[Shape, Variant]]) -> Iterator[Variant]:
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
    variants = list(dict.fromkeys(with_companions(pairs)))
    todo = [
        (variant, arch) for arch in options.arch or known for variant in variants if variant.runs_on(arch)
    ]
    rows: list[CompiledKernel] = []
    is_partial = False
    try:
        for number, (variant, arch) in enumerate(todo):
            if progress is not None:
                progress(number, len(todo), f"{variant.name} for sm_{arch}")
            rows.append(_compiled_row(compile_variant(variant, arch)))
    except KeyboardInterrupt:
        is_partial = True
    return KernelBenchResult(
        "compile", None, compiled=tuple(rows), skipped=tuple(skipped), is_partial=is_partial
    )


def _compiled_row(compiled: Compiled) -> CompiledKernel:
    variant = compiled.variant
    return CompiledKernel(
        variant.kernel,
        variant.name,
        compiled.architecture,
        compiled.registers,
        variant.register_budget,
        compiled.spill_bytes,
        compiled.stack_bytes,
        compiled.static_shared_bytes + variant.shared_bytes(),
        len(compiled.cubin),
        compiled.compiler,
    )


def _emulate(
    options: KernelBenchOptions, shapes: Sequence[Shape], progress: Progress | None
) -> KernelBenchResult:
    """Every kernel on the fixed cases, or, where a batch or a length was given, on the shapes themselves."""
    from kvplan.kernels.cases import CASES
    from kvplan.kernels.validate import validate

    pairs, skipped = variants_of(options, shapes)
    if options.batch or options.seq:
        work = sum(shape.batch * shape.seq * shape.heads for shape, _ in pairs)
        if work > MOST_EMULATED_PAIRS:
            raise InputError(
                f"{work:,} products of a query head with a key take too long on a CPU",
                where="--emulate",
                hint=f"give a smaller --batch or --seq: at most {MOST_EMULATED_PAIRS:,}",
            )
        tasks: list[tuple[list[Variant], Sequence[Case]]] = [
            ([variant], [_case_of(shape)]) for shape, variant in pairs
        ]
    else:
        tasks = [(list(dict.fromkeys(with_companions(pairs))), CASES)]
    results: list[KernelResult] = []
    is_partial = False
    try:
        for variants, cases in tasks:
            results += map(case_row, validate(variants, cases, progress))
    except KeyboardInterrupt:
        is_partial = True
    return KernelBenchResult("emulate", None, tuple(results), skipped=tuple(skipped), is_partial=is_partial)


def _case_of(shape: Shape) -> Case:
    from kvplan.kernels.cases import Case

    return Case(
        "as asked",
        (shape.seq,) * shape.batch,
        group=shape.group,
        num_kv_heads=shape.kv_heads,
        block_size=shape.block_size,
    )


def case_row(found: CaseResult) -> KernelResult:
    """What a variant gave for a case, as a row of the results."""
    return KernelResult(
        kernel=found.kernel,
        variant=found.variant,
        case=found.case,
        batch=found.batch,
        seq=found.seq,
        heads=found.heads,
        kv_heads=found.kv_heads,
        head_dim=found.head_dim,
        block_size=found.block_size,
        dtype=found.dtype,
        kv_cache_dtype=found.kv_cache_dtype,
        max_abs_error=finite(found.max_abs_error),
        max_rel_error=finite(found.max_rel_error),
        tolerance={name: value for name, value in found.tolerance.items() if finite(value) is not None}
        or None,
        valid=found.valid,
        error=found.error,
    )


def finite(error: float) -> float | None:
    """None where no number came out."""
    return error if error < float("inf") else None
