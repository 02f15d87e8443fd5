"""From a model, GPUs and options to a plan of memory: what `size`, `simulate` and `check` share.

Settings that were not given get the engine version's own defaults; each remembers where it came from.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvplan.config import load_gpu, load_model
from kvplan.core.deployment import Deployment
from kvplan.core.engine_rules import EngineRules
from kvplan.core.engine_sizing import EngineSizing, engine_sizing
from kvplan.core.gpu import Gpu
from kvplan.core.kv_cache import (
    STATES,
    CacheFormat,
    CompressedLatent,
    CrossAttention,
    LatentAttention,
    LayerCache,
)
from kvplan.core.lora import LoraSlots
from kvplan.core.model import STRETCHING, ModelSpec
from kvplan.core.sizing import (
    Budget,
    Capacity,
    GpuBudget,
    KvSizes,
    Plan,
    WeightSizes,
    check_tensor_parallel,
    fits,
    plan_capacity,
    weight_sizes,
)
from kvplan.core.weights import DTYPE_BYTES, Ranks
from kvplan.errors import InputError, unknown_name
from kvplan.options import Engine, Resolver, ServingOptions, flag, size_in_bytes

if TYPE_CHECKING:
    from kvplan.calibration import Calibration

#: Ways to draft that need no layers with a cache.
_METHODS_WITHOUT_LAYERS = ("ngram", "suffix", "medusa", "mlp_speculator", "gemma4_mtp")


@dataclass(frozen=True, slots=True)
class Served:
    """A model, served: what it takes and, with a memory budget, what fits."""

    spec: ModelSpec
    gpu: Gpu | None
    engine: Engine
    plan: Plan
    kv: KvSizes
    weights: WeightSizes
    budget: GpuBudget | None
    capacity: Capacity | None
    warnings: tuple[str, ...]
    calibration: Calibration | None = None

    @property
    def deployment(self) -> Deployment:
        """The settings, resolved."""
        return self.plan.deployment


def serve(
    spec: ModelSpec,
    resolver: Resolver[Any],
    *,
    gpu: Gpu | None,
    gpu_count: int | None,
    seq: int | None = None,
    concurrency: int = 1,
) -> Served:
    """Resolve the settings and plan the memory of one deployment.

    ``gpu_count`` is how many GPUs ``--gpu`` names, None if it does not say; ``seq`` the length of a sequence,
    None: the longest that is served. Raises `InputError` for settings that the engine refuses.
    """
    case = _settle(spec, resolver, gpu, gpu_count, seq, concurrency)
    served = case.served()
    if resolver.options.max_model_len == "auto" and served.capacity is not None:
        longest = min(served.capacity.max_model_len_that_fits, case.deployment.max_model_len)
        if longest:
            resolver.note("max_model_len", longest, "--max-model-len auto: the longest that fits")
            fitted = case.deployment._replace(max_model_len=longest, seq=longest if seq is None else seq)
            served = case._replace(deployment=fitted).served()
    return served


def would_fit(
    spec: ModelSpec,
    resolver: Resolver[Any],
    *,
    gpu: Gpu | None,
    gpu_count: int | None,
    seq: int | None = None,
    concurrency: int = 1,
) -> bool:
    """``capacity.fits`` of what `serve` gives for the same arguments, without the rest: for searches.

    A memory budget must be given, and a length other than ``auto``. Raises `InputError` as `serve` does.
    """
    case = _settle(spec, resolver, gpu, gpu_count, seq, concurrency)
    plan = case.plan()
    return fits(plan, case.budgeted(plan))


class _Case(NamedTuple):
    """A model to be served with every setting resolved, and the memory that there is."""

    spec: ModelSpec
    gpu: Gpu | None
    engine: Engine
    sizing: EngineSizing
    deployment: Deployment
    budget: GpuBudget | None
    calibration: Calibration | None
    resolver: Resolver[Any]
    warnings: list[str]

    def served(self) -> Served:
        """What it takes and, where there is a budget, what fits."""
        plan = self.plan()
        budgeted = self.budgeted(plan)
        capacity = None
        if self.budget is not None or self.deployment.pool_is_given:
            capacity = plan_capacity(plan, budgeted)
        limiting = plan.stages[capacity.limiting_rank if capacity else _heaviest(plan)]
        return Served(
            spec=self.spec,
            gpu=self.gpu,
            engine=self.engine,
            plan=plan,
            kv=plan.kv_sizes(limiting),
            weights=weight_sizes(self.spec, self.deployment, plan.stages),
            budget=self.budget,
            capacity=capacity,
            warnings=tuple(self.warnings),
            calibration=self.calibration,
        )

    def plan(self) -> Plan:
        """The engine's pool, and its split of the layers."""
        stages = self.sizing.stages(self.spec.num_layers, self.deployment.pipeline_parallel_size)
        return Plan(self.spec, self.deployment, self.sizing.make_pool, stages)

    def budgeted(self, plan: Plan) -> Budget:
        """The memory that there is, with the overhead of each stage: measured where a calibration holds.

        Without an overhead where the pool is given or no memory is known.
        """
        kept, budget, sizing, deployment = self.calibration, self.budget, self.sizing, self.deployment
        if deployment.pool_is_given or budget is None:
            if kept is not None and kept.step_times is None:
                why = "the memory of a GPU is not known" if budget is None else "the pool is given"
                self._say_once(f"the calibration has no effect: {why}")
            return Budget(budget, ())
        if kept is not None and not kept.has_memory:
            self.resolver.note("overhead", "estimated", "the calibration holds step times alone")
        elif kept is not None:
            from kvplan.calibration import measured_overhead

            measured, source, reasons = measured_overhead(
                kept,
                self.spec,
                deployment,
                budget,
                plan.loaded(),
                lambda settings: sizing.overhead(self.spec, settings, self.gpu),
            )
            for reason in reasons:
                self._say_once(f"calibration of {kept.source}: {reason}")
            if measured is not None:
                self.resolver.note("overhead", source, kept.source)
                return Budget(budget, (measured,) * len(plan.stages), source=source)
            self.resolver.note("overhead", source, "the calibration does not hold")
        overhead = sizing.overhead(self.spec, deployment, self.gpu)
        return Budget(budget, (overhead,) * len(plan.stages), sizing.overhead_is_guess)

    def _say_once(self, text: str) -> None:
        """Warn, though the plan may be made twice."""
        if text not in self.warnings:
            self.warnings.append(text)


def _settle(
    spec: ModelSpec,
    resolver: Resolver[Any],
    gpu: Gpu | None,
    gpu_count: int | None,
    seq: int | None,
    concurrency: int,
) -> _Case:
    """Every setting, and the memory that there is; arguments as for `serve`."""
    options: ServingOptions = resolver.options
    warnings: list[str] = []
    if options.quantization is not None:
        method = resolver.choose("quantization", "", "default")
        spec = replace(spec, weights=spec.weights.quantized_by(method))
    engine = resolver.note_engine()
    sizing = engine_sizing(engine.name, engine.version)
    check_settings(options, sizing.rules)
    deployment = _deployment(spec, resolver, sizing.rules, engine, gpu, gpu_count, warnings)
    deployment = deployment._replace(
        seq=deployment.max_model_len if seq is None else seq, concurrency=concurrency
    )
    budget = _gpu_budget(gpu, options, deployment)
    if resolver.is_asked("margin") and (deployment.pool_is_given or budget is None):
        why, hint = "no GPU is named whose memory it is of", "leave it out, or give --gpu"
        if deployment.pool_is_given:
            why, hint = "the pool is given", "leave it out"
        raise InputError(f"--margin has no effect: {why}", where="--margin", hint=hint)
    calibration = _calibration(options)
    return _Case(spec, gpu, engine, sizing, deployment, budget, calibration, resolver, warnings)


def _calibration(options: ServingOptions) -> Calibration | None:
    """What ``--calibration`` names."""
    if options.calibration is None:
        return None
    from kvplan.calibration import load_calibration  # only such runs need it

    return load_calibration(Path(options.calibration))


def _heaviest(plan: Plan) -> int:
    """The stage whose blocks are largest: without a budget, the one that will limit."""
    sizes = [plan.pool.bytes_per_block(stage) for stage in plan.stages]
    return sizes.index(max(sizes))


# Settings


def check_settings(options: ServingOptions, rules: EngineRules) -> None:
    """Refuse what the engine, or this version of it, does not have. Raises `InputError`."""
    for name in sorted(rules.missing_settings):
        if getattr(options, name) not in (None, False):  # nobody lacks what is switched off
            if rules.version:
                raise InputError(
                    f"{flag(name)} is no setting of engine {rules.name}@{rules.version}: it came later",
                    where=flag(name),
                    hint=f"use a newer version of engine {rules.name}, or {flag('no_' + name)}",
                )
            raise InputError(
                f"{flag(name)} is no setting of engine {rules.name}, or its effect there is not known",
                where=flag(name),
                hint="leave it out, or use engine vllm",
            )


def _deployment(
    spec: ModelSpec,
    resolver: Resolver[Any],
    rules: EngineRules,
    engine: Engine,
    gpu: Gpu | None,
    gpu_count: int | None,
    warnings: list[str],
) -> Deployment:
    """Every setting but the sequences, which are left at one token."""
    options: ServingOptions = resolver.options
    default = f"default of {engine.name} {engine.version}".rstrip()
    caches = [item.cache for item in spec.layers]
    length = _max_model_len(spec, rules, resolver, warnings)
    memory = _memory_bytes(gpu, options)
    batch, seqs = choose_batch_limits(
        resolver,
        rules,
        rules.batch_limits(memory, gpu.name if gpu else ""),
        length,
        f"{default} on {gpu.name if gpu else 'a GPU of this memory'}"
        if memory is not None
        else f"{default} without a known GPU",
    )
    if batch < seqs and rules.batch_holds_sequences:
        raise InputError(
            f"max_num_batched_tokens {batch} is below max_num_seqs {seqs}",
            where="--max-num-batched-tokens",
            hint="raise it, or lower --max-num-seqs",
        )
    ranks = _ranks(resolver, gpu_count, default, spreads_layers=rules.spreads_layers)
    check_tensor_parallel(spec, ranks.tensor)
    context = _decode_context(spec, resolver, ranks.tensor, default)
    drafts = _drafts(spec, resolver, ranks.tensor)
    dtype = _dtype(spec, resolver, default)
    capability = gpu.compute_capability if gpu else None
    kv_form = _kv_form(spec, resolver, dtype, rules, capability, default)
    states = any(isinstance(cache, STATES) for cache in caches)
    caching = rules.prefix_caching(
        has_states=states, has_attention=any(not isinstance(cache, STATES) for cache in caches)
    )
    conv_dtype, state_dtype = rules.state_dtypes(caches)
    eager = resolver.choose("enforce_eager", False, default)
    share = rules.memory_share(
        memory_bytes=memory,
        ranks=ranks.tensor * ranks.pipeline,
        max_num_batched_tokens=batch,
        enforce_eager=eager,
        caches=caches,
    )
    return Deployment(
        seq=1,
        max_model_len=length,
        cache=CacheFormat(
            dtype=dtype,
            kv_cache_dtype=kv_form,
            tensor_parallel_size=ranks.tensor,
            decode_context_parallel_size=context,
            num_speculative_tokens=drafts.tokens,
            mamba_cache_dtype=_state_dtype(resolver, "mamba_cache_dtype") or conv_dtype,
            mamba_ssm_cache_dtype=_state_dtype(resolver, "mamba_ssm_cache_dtype") or state_dtype,
            latent_row_multiple=rules.latent_row_multiple,
            encoder_tokens=rules.encoder_tokens(batch, _encoder_length(spec)),
        ),
        engine=engine.name,
        version=engine.version,
        pipeline_parallel_size=ranks.pipeline,
        data_parallel_size=ranks.data,
        enable_expert_parallel=_expert_parallel(spec, resolver, default),
        block_size=_block_size(spec, resolver, rules, kv_form, capability, default),
        gpu_memory_utilization=resolver.choose("gpu_memory_utilization", share, default),
        max_num_seqs=seqs,
        is_max_num_seqs_given=options.max_num_seqs is not None,
        max_num_batched_tokens=batch,
        enforce_eager=eager,
        enable_prefix_caching=resolver.choose("enable_prefix_caching", caching, default),
        async_scheduling=resolver.choose("async_scheduling", rules.async_scheduling(drafts.method), default),
        hybrid_kv_cache_manager=not resolver.choose("disable_hybrid_kv_cache_manager", False, default),
        speculative_method=drafts.method,
        drafts=drafts.layers,
        draft_weights_bytes=drafts.weights_bytes,
        lora=_lora(resolver, default),
        compute_capability=capability,
        margin=resolver.choose("margin", "mid", "default"),
        kv_cache_memory_bytes=_given_size(resolver, "kv_cache_memory_bytes"),
        num_gpu_blocks_override=_given(resolver, options.num_gpu_blocks_override, "num_gpu_blocks_override"),
    )


class _Ranks(NamedTuple):
    tensor: int
    pipeline: int
    data: int


def _ranks(resolver: Resolver[Any], gpu_count: int | None, default: str, *, spreads_layers: bool) -> _Ranks:
    """Degrees of parallelism; a number of GPUs alone is tensor parallel, or stages if the engine spreads layers."""
    options: ServingOptions = resolver.options
    tensor = resolver.choose("tensor_parallel_size", 1, default)
    pipeline = resolver.choose("pipeline_parallel_size", 1, default)
    if gpu_count and not options.has_degrees:
        if spreads_layers:
            name, pipeline = "pipeline_parallel_size", gpu_count
        else:
            name, tensor = "tensor_parallel_size", gpu_count
        resolver.note(name, gpu_count, "--gpu", given=True)
    data = resolver.choose("data_parallel_size", 1, default)
    needed = tensor * pipeline * data
    if gpu_count is not None and gpu_count != needed:
        sizes = [f"tensor parallel size {tensor}"]
        sizes += [f"pipeline parallel size {pipeline}"] if pipeline > 1 else []
        sizes += [f"data parallel size {data}"] if data > 1 else []
        raise InputError(
            f"{gpu_count} GPUs for {' x '.join(sizes)}",
            where="--gpu",
            hint=f"name {needed} GPUs, or leave the number out",
        )
    return _Ranks(tensor, pipeline, data)


def _expert_parallel(spec: ModelSpec, resolver: Resolver[Any], default: str) -> bool:
    """Whether experts are shared out whole; refused, as vLLM does, for a model that has none."""
    chosen = resolver.choose("enable_expert_parallel", False, default)
    if chosen and spec.weights.groups and not spec.has_experts:
        raise InputError(
            f"{spec.name} has no experts to share out", where="--enable-expert-parallel", hint="leave it out"
        )
    return chosen


def _encoder_length(spec: ModelSpec) -> int | None:
    """Tokens of the encoder's longest input, where cross attention reads one and the model says so."""
    return next(
        (item.cache.encoder_length for item in spec.layers if isinstance(item.cache, CrossAttention)), None
    )


def _decode_context(spec: ModelSpec, resolver: Resolver[Any], tensor: int, default: str) -> int:
    """Ranks that share out the tokens of a sequence (vLLM config/model.py, config/parallel.py)."""
    size = resolver.choose("decode_context_parallel_size", 1, default)
    where = "--decode-context-parallel-size"
    if tensor % size:
        raise InputError(
            f"decode context parallel size {size} does not divide tensor parallel size {tensor}",
            where=where,
            hint=f"use a divisor of {tensor}",
        )
    latent = any(isinstance(item.cache, LatentAttention) for item in spec.layers)
    if size > 1 and not latent:
        most = tensor // spec.num_kv_heads
        if most < size:
            raise InputError(
                f"decode context parallel size {size} needs each of {spec.num_kv_heads} KV heads on as many of "
                f"{tensor} ranks",
                where=where,
                hint=f"use at most {most}" if most > 1 else "leave it out, or use more tensor parallel ranks",
            )
        if spec.num_heads // spec.num_kv_heads % size:
            raise InputError(
                f"decode context parallel size {size} does not divide the "
                f"{spec.num_heads // spec.num_kv_heads} attention heads of each KV head",
                where=where,
                hint="use a divisor",
            )
    return size


class _Drafts(NamedTuple):
    tokens: int = 0
    method: str | None = None
    layers: tuple[LayerCache, ...] = ()
    weights_bytes: int = 0


def _drafts(spec: ModelSpec, resolver: Resolver[Any], tensor: int) -> _Drafts:
    """What speculative decoding adds: the model's own layers for multi-token prediction, or a draft model's."""
    options: ServingOptions = resolver.options
    if options.num_speculative_tokens is None:
        for name in ("speculative_method", "speculative_model"):
            if getattr(options, name) is not None:
                raise InputError(
                    f"{flag(name)} is given without a number of tokens",
                    where=flag(name),
                    hint="add --num-speculative-tokens",
                )
        return _Drafts()
    tokens = resolver.choose("num_speculative_tokens", 0, "default")
    own = spec.draft_layers
    draft = options.speculative_model
    method = resolver.choose(
        "speculative_method", "mtp" if own and draft is None else None, "the model's own"
    )
    if method is None and draft is not None:
        method = "draft_model"
    if method is None:
        raise InputError(
            f"{spec.name} has no layers of its own for multi-token prediction",
            where="--num-speculative-tokens",
            hint="give --speculative-model, or --speculative-method ngram",
        )
    if method.endswith("mtp") and method != "gemma4_mtp":
        if not own:
            raise InputError(
                f"{spec.name} has no layers for multi-token prediction",
                where="--speculative-method",
                hint="give --speculative-model, or another method",
            )
        modules = len({item.layer for item in own})
        if tokens > modules and tokens % modules:
            raise InputError(
                f"{tokens} speculative tokens are no multiple of the {modules} layers that draft one each",
                where="--num-speculative-tokens",
                hint=f"use a multiple of {modules}",
            )
        return _Drafts(tokens, "mtp", own)
    if method in _METHODS_WITHOUT_LAYERS:
        return _Drafts(tokens, method)
    if draft is None:
        raise InputError(
            f"method {method} drafts with a model of its own",
            where="--speculative-method",
            hint="give --speculative-model",
        )
    resolver.choose("speculative_model", draft, "default")
    model = load_model(draft, catalogue=options.catalogue, where="--speculative-model")
    layers = tuple(LayerCache(spec.num_layers + item.layer, item.cache) for item in model.layers)
    weights = model.weights.rank_bytes(model.dtype, Ranks(tensor, num_kv_heads=model.num_kv_heads))
    if weights is None:
        raise InputError(
            f"the size of the draft's weights is not known: {model.weights.why_unknown}",
            where=f"model {model.name}",
            hint="give a folder with its *.safetensors files",
        )
    return _Drafts(tokens, method, layers, weights)


def _lora(resolver: Resolver[Any], default: str) -> LoraSlots | None:
    """Slots for LoRA adapters, if there are any."""
    options: ServingOptions = resolver.options
    if not resolver.choose("enable_lora", False, default):
        for name in ("max_loras", "max_lora_rank"):
            if getattr(options, name) is not None:
                raise InputError(
                    f"{flag(name)} has no effect", where=flag(name), hint="add --enable-lora, or leave it out"
                )
        return None
    return LoraSlots(resolver.choose("max_loras", 1, default), resolver.choose("max_lora_rank", 16, default))


def choose_batch_limits(
    resolver: Resolver[Any], rules: EngineRules, defaults: tuple[int, int], max_model_len: int, source: str
) -> tuple[int, int]:
    """``(max_num_batched_tokens, max_num_seqs)``: given, or fitted to the longest sequence as the engine does."""
    batch, seqs = defaults
    batch = rules.fitted_batch(
        batch,
        resolver.options.max_num_seqs or seqs,
        max_model_len,
        chunked_prefill=getattr(resolver.options, "enable_chunked_prefill", None) is not False,
    )
    batch = resolver.choose("max_num_batched_tokens", batch, source)
    if rules.batch_holds_sequences:
        seqs = min(seqs, batch)
    return batch, resolver.choose("max_num_seqs", seqs, source)


def _max_model_len(spec: ModelSpec, rules: EngineRules, resolver: Resolver[Any], warnings: list[str]) -> int:
    """The longest sequence that the engine serves; ``auto`` is left at its default here."""
    lengths, given = rules.lengths(spec), resolver.options.max_model_len
    asked = getattr(resolver.options, "seq", None) if resolver.seq_sets_length else None
    if lengths is None:
        if asked is not None and given is None:
            return resolver.choose("max_model_len", int(asked), "--seq: the model states no maximum")
        if not isinstance(given, int):
            raise InputError(
                "the model states no maximum length", where=f"model {spec.name}", hint="give --max-model-len"
            )
        return resolver.choose("max_model_len", given, "--max-model-len")
    default, most = lengths
    length: int | str = resolver.choose("max_model_len", default, "the model's maximum")
    if not isinstance(length, int):
        return default
    if length > most:
        if not any(scaling.kind in STRETCHING for scaling in spec.position_scalings):
            raise InputError(
                f"max_model_len {length:,} is beyond the {most:,} tokens that the engine lets the model have",
                where="--max-model-len",
                hint=f"use at most {most}, or --set max_position_embeddings={length} to plan it all the same",
            )
        warnings.append(
            f"max_model_len {length:,} is beyond the {most:,} tokens that the engine lets the model have: it starts "
            "only with VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
        )
        return length
    if given is None and default < most and any(s.kind == "longrope" for s in spec.position_scalings):
        warnings.append(
            f"the engine starts at the {default:,} tokens before LongRoPE stretches positions; --max-model-len lets "
            f"sequences have up to {most:,}"
        )
    elif spec.max_position_embeddings is not None and length > spec.max_position_embeddings:
        warnings.append(
            f"max_model_len {length:,} is beyond the model's {spec.max_position_embeddings:,} tokens: positions are "
            "stretched"
        )
    return length


def _dtype(spec: ModelSpec, resolver: Resolver[Any], default: str) -> str:
    dtype = resolver.choose("dtype", "auto", default)
    if dtype == "auto":
        resolver.spell_out("dtype", spec.dtype, "the model's own")
        return spec.dtype
    alias = {"half": "float16", "float": "float32"}.get(dtype, dtype)
    if alias not in DTYPE_BYTES:
        raise unknown_name("dtype", dtype, [*DTYPE_BYTES, "auto"], where="--dtype")
    return alias


def _kv_form(
    spec: ModelSpec,
    resolver: Resolver[Any],
    dtype: str,
    rules: EngineRules,
    capability: str | None,
    default: str,
) -> str:
    """The form of the KV cache, in the engine's words."""
    asked = resolver.choose("kv_cache_dtype", "auto", default)
    form, why = rules.kv_form(asked, spec=spec, dtype=dtype, compute_capability=capability)
    if why:
        resolver.spell_out("kv_cache_dtype", form, why)
    return form


def _block_size(
    spec: ModelSpec,
    resolver: Resolver[Any],
    rules: EngineRules,
    kv_form: str,
    capability: str | None,
    default: str,
) -> int:
    caches = [item.cache for item in spec.layers]
    size, special = rules.default_block_size(caches, kv_form, capability)
    chosen = resolver.choose("block_size", size, f"{default} for {special}" if special else default)
    ratio = math.lcm(*(cache.tokens_per_state for cache in caches if isinstance(cache, CompressedLatent)))
    if chosen % ratio:
        raise InputError(
            f"block size {chosen} is no multiple of the {ratio} tokens that a latent stands for",
            where="--block-size",
            hint=f"use a multiple of {ratio}",
        )
    return chosen


def _state_dtype(resolver: Resolver[Any], name: str) -> str | None:
    """The dtype of a state, None for "auto"."""
    dtype = resolver.choose(name, "auto", "default")
    if dtype == "auto":
        return None
    if dtype not in DTYPE_BYTES:
        raise unknown_name("dtype", dtype, [*DTYPE_BYTES, "auto"], where=flag(name))
    return dtype


def _given_size(resolver: Resolver[Any], name: str) -> int | None:
    return _given(resolver, size_in_bytes(getattr(resolver.options, name), name), name)


def _given(resolver: Resolver[Any], value: int | None, name: str) -> int | None:
    if value is not None:
        resolver.choose(name, None, "default")
    return value


# GPUs


def find_gpu(text: str | None) -> tuple[Gpu | None, int | None]:
    """The one GPU that ``--gpu`` names and, where it says so (``8xh100``), how many."""
    if text is None:
        return None, None
    if "," in text or text.lower() == "all":
        raise InputError(f'"{text}" names several GPUs', where="--gpu", hint="name one here")
    match = re.fullmatch(r"([0-9]{1,6})x(.+)", text)
    if not match:
        return load_gpu(text), None
    count = int(match.group(1))
    if count == 0:
        raise InputError(f'"{text}" names no GPU', where="--gpu", hint="write 1x or more")
    return load_gpu(match.group(2)), count


def _memory_bytes(gpu: Gpu | None, options: ServingOptions) -> int | None:
    given = size_in_bytes(options.gpu_memory, "gpu_memory")
    return given if given is not None or gpu is None else gpu.memory_bytes


def _gpu_budget(gpu: Gpu | None, options: ServingOptions, deployment: Deployment) -> GpuBudget | None:
    """The memory to plan with: ``--gpu-memory``, else what the catalogue says; None without either."""
    given = size_in_bytes(options.gpu_memory, "gpu_memory")
    if given is not None:
        return GpuBudget(gpu.name if gpu else "gpu", deployment.gpus, given, "--gpu-memory")
    if gpu is None:
        return None
    if gpu.memory_bytes is None:
        raise InputError(
            f"the memory of {gpu.name} is not known", where="--gpu", hint="give --gpu-memory, such as 80GiB"
        )
    return GpuBudget(gpu.name, deployment.gpus, gpu.memory_bytes, gpu.memory_source or "catalogue")
