"""From a deployment to the model of its step times: what each rank does in a step, and which constants hold."""

from __future__ import annotations

from collections.abc import Sequence

from kvplan.config import load_gpu
from kvplan.core.communication import Link
from kvplan.core.cost import LatencyModel, Settings
from kvplan.core.gpu import Gpu
from kvplan.core.kv_cache import (
    STATES,
    WINDOWS,
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    LatentAttention,
    LayerCache,
    SlidingWindow,
    SparseIndexer,
    kv_heads_per_rank,
)
from kvplan.core.step_constants import (
    CONSTANT_NAMES,
    MEASURED_ERRORS,
    ChosenConstants,
    ConstantName,
    EngineCosts,
    launched_eagerly,
    shipped_constants,
    vllm_generation,
)
from kvplan.core.step_shape import Attention, Experts, Flops, GpuRates, Matrices, Reductions, StageShape
from kvplan.core.vllm_rules import vllm_rules
from kvplan.core.weights import DTYPE_BYTES, RankPart, Ranks, Stage, ceil_div
from kvplan.errors import InputError
from kvplan.serving import Served

#: Links between GPUs that are faster than this, both directions together, are switched ones: PCIe 5.0 has 128 GB/s.
_FASTEST_BUS = 128 * 10**9
#: Tokens over which the growth of compressed caches is whole.
_GROWTH_SPAN = 128
#: Kernels of a layer: four matrix products, two of attention, one each to rotate, to write the cache and for the MLP's
#: product, two norms that add the residual; and those that route to experts (router, top-k, sort, sum).
_LAYER_KERNELS = 11
_EXPERT_KERNELS = 4
#: The largest batch that vLLM captures a CUDA graph for (config/vllm.py, max_cudagraph_capture_size).
_LARGEST_GRAPH = 512


def latency_model(
    served: Served, *, block_bytes: int = 0, chosen: ChosenConstants | None = None
) -> tuple[LatencyModel, ChosenConstants]:
    """The model of a deployment's step times, and which constants it has: ``chosen``, else those that are shipped.

    Raises `InputError` where the GPU's rates or the model's weights are not known.
    """
    rates = gpu_rates(served.gpu)
    costs = engine_costs(served)
    if chosen is None:
        chosen = choose_constants(served.gpu, costs)
    settings = Settings(_LARGEST_GRAPH if costs.has_graphs else 0, costs.overlaps_host, block_bytes)
    return LatencyModel(stage_shapes(served), rates, chosen.constants, settings), chosen


def engine_costs(served: Served) -> EngineCosts:
    """The generation of the engine; engines beside vLLM are taken for the newest vLLM, whose kernels they would run."""
    version = served.engine.version if served.engine.name == "vllm" else ""
    costs = vllm_generation(
        vllm_rules(version).number,
        async_scheduling=served.deployment.async_scheduling,
        architecture=served.gpu.architecture if served.gpu else "",
    )
    return launched_eagerly(costs) if served.deployment.enforce_eager else costs


def choose_constants(gpu: Gpu | None, costs: EngineCosts) -> ChosenConstants:
    """The shipped constants for a GPU and a generation of an engine, and how far off they were."""
    measured: dict[ConstantName, float] = {}
    names: list[str] = []
    while gpu is not None and gpu.name not in names:
        names.append(gpu.name)
        if gpu.kernels is not None:
            fields = gpu.kernels._asdict()
            measured = {**{name: fields[name] for name in CONSTANT_NAMES if fields.get(name)}, **measured}
        gpu = load_gpu(gpu.kernels_like) if gpu.kernels_like else None
    like = f" as of {' and '.join(names[1:])}" if names[1:] else "" if measured else ", not measured"
    name = f"shipped constants: {names[0] if names else 'a GPU'}{like}; {costs.name}"
    error = MEASURED_ERRORS.get((names[0], costs.name)) if names else None
    return ChosenConstants(shipped_constants(measured, costs), name, error)


def gpu_rates(gpu: Gpu | None) -> GpuRates:
    """What the datasheet promises. Raises `InputError` where it is not known."""
    if gpu is None or gpu.bandwidth_bytes_per_s is None or gpu.flops_fp16 is None:
        name = "another GPU" if gpu is not None else "the GPU"
        raise InputError(
            "the GPU's bandwidth and FLOP/s are not known",
            where="--gpu",
            hint=f"name {name} with --gpu, or simulate with --step-time",
        )
    both_ways = gpu.interconnect_bytes_per_s or 2 * gpu.host_bytes_per_s
    return GpuRates(
        gpu.bandwidth_bytes_per_s,
        gpu.flops_fp16,
        gpu.flops_fp8 or gpu.flops_fp16,
        Link(both_ways // 2, is_switched=both_ways > _FASTEST_BUS),
        gpu.host_bytes_per_s,
    )


def stage_shapes(served: Served) -> tuple[StageShape, ...]:
    """What a rank of each stage does in a step. Raises `InputError` where the model's weights are not known."""
    return tuple(_stage_shape(served, stage) for stage in served.plan.stages)


def _stage_shape(served: Served, stage: Stage) -> StageShape:
    spec, deployment = served.spec, served.deployment
    tp, replicas = deployment.tensor_parallel_size, deployment.data_parallel_size
    ranks = Ranks(tp, replicas, deployment.enable_expert_parallel, spec.num_kv_heads)
    parts = spec.weights.rank_parts(deployment.dtype, ranks, stage)
    layers = min(stage.end, spec.num_layers) - stage.first
    hidden = spec.hidden_size * DTYPE_BYTES[deployment.dtype]
    experts = _experts(parts, ranks)
    reductions = [Reductions(layers + stage.is_first, tp, hidden)]
    if experts:
        reductions.append(Reductions(layers, tp * replicas, hidden * replicas))
    else:
        reductions.append(Reductions(layers, tp, hidden))
    return StageShape(
        kernels=layers * (_LAYER_KERNELS + (_EXPERT_KERNELS if experts else 0)) + _unfused(parts, tp),
        dense=_dense(served, parts, stage),
        head=_product([part for part in parts if part.group.kind == "head" and stage.is_last]),
        experts=experts,
        attention=_attention(served, stage),
        activation_bytes=layers * _activation_bytes(served),
        reductions=tuple(item for item in reductions if item.ranks > 1),
        sent_bytes=0 if stage.is_last else hidden,
    )


def _unfused(parts: Sequence[RankPart], tensor_parallel_size: int) -> int:
    """Kernels of a stage's layers that others have no need of.

    A product whose result has a bias (OPT, BLOOM, GPT-NeoX, Phi) is followed by a plain layer norm, to which the
    residual is added apart; so is the bias once ranks have added up their parts (vLLM layers/linear.py,
    RowParallelLinear).
    """
    biases = [part for part in parts if part.group.name.endswith(("o_proj.bias", "down_proj.bias"))]
    return sum(part.layers for part in biases) * (2 if tensor_parallel_size > 1 else 1)


def _dense(served: Served, parts: Sequence[RankPart], stage: Stage) -> Matrices:
    """What every token is multiplied with, vectors included."""
    if parts:
        return _product([part for part in parts if part.group.kind in ("linear", "plain", "vector")])
    weights, deployment = served.spec.weights, served.deployment
    held = weights.rank_bytes(deployment.dtype, Ranks(deployment.tensor_parallel_size), stage)
    if held is None or weights.parameters is None:
        raise InputError("the size of the weights is not known", where="--model", hint="give --step-time")
    return Matrices(held, 2 * weights.parameters // deployment.tensor_parallel_size)


def _product(parts: Sequence[RankPart]) -> Matrices:
    """A multiplication and an addition for each element of a matrix; vectors are only read."""
    flops = {8: 0, 16: 0}
    for part in parts:
        if part.group.columns > 1:
            flops[part.scheme.operand_bits if part.scheme else 16] += 2 * part.elements
    return Matrices(sum(part.bytes for part in parts), flops[16], flops[8])


def _experts(parts: Sequence[RankPart], ranks: Ranks) -> tuple[Experts, ...]:
    """Experts by how many there are and how many a token uses."""
    kinds: dict[tuple[int, int, int], list[RankPart]] = {}
    for part in parts:
        if part.group.kind == "experts":
            kinds.setdefault((part.group.copies, part.copies, part.group.used), []).append(part)
    found = []
    for (total, local, used), members in kinds.items():
        whole = _product(members)
        found.append(
            Experts(
                total,
                local,
                used,
                read_bytes=ceil_div(whole.read_bytes, local),
                flops=whole.flops // local,
                flops_8bit=whole.flops_8bit // local,
                replicas=ranks.data_parallel_size,
            )
        )
    return tuple(found)


def _attention(served: Served, stage: Stage) -> tuple[Attention, ...]:
    kinds: dict[Attention, int] = {}
    found: list[Attention] = []
    for item in served.spec.layers:
        if not stage.holds(item.layer):
            continue
        one = _layer_attention(served, item)
        kinds[one] = kinds.get(one, 0) + 1
    for one, count in kinds.items():
        found.append(
            Attention(
                one.context_bytes * count,
                one.pair_flops * count,
                one.chunk_pair_flops * count,
                one.chunk_token_bytes * count,
                one.window,
                one.sequence_bytes * count,
            )
        )
    return tuple(found)


def _layer_attention(served: Served, item: LayerCache) -> Attention:
    """One layer on one rank: its cache's bytes, and FLOPs of queries with keys and of weights with values."""
    cache, form, spec = item.cache, served.deployment.cache, served.spec
    heads = ceil_div(spec.num_heads, form.tensor_parallel_size)
    if isinstance(cache, (*STATES, CrossAttention)):
        size = cache.payload_bytes(_GROWTH_SPAN, form)
        return Attention(sequence_bytes=size if isinstance(cache, STATES) else size // 2)
    span = _GROWTH_SPAN * form.decode_context_parallel_size
    window: int | None = None
    pair = chunk_pair = own = 0
    element = DTYPE_BYTES[form.dtype]
    if isinstance(cache, LatentAttention):
        # Decoding multiplies with the latent itself, a prompt's chunk with the keys and values made of it
        # (model_executor/layers/attention/mla_attention.py).
        pair = 2 * heads * (2 * cache.kv_lora_rank + cache.qk_rope_head_dim)
        chunk_pair = 2 * heads * (2 * spec.head_dim - cache.qk_rope_head_dim)
        own = heads * (4 * spec.head_dim - 2 * cache.qk_rope_head_dim) * element
        # An indexer picks the tokens, for layers that have none of their own too.
        window = next((one.topk for one, _ in spec.attention if isinstance(one, SparseIndexer)), None)
    elif isinstance(cache, FullAttention | SlidingWindow | ChunkedLocal):
        pair = chunk_pair = 2 * heads * (cache.head_dim + cache.value_size)
        kept = kv_heads_per_rank(cache.num_kv_heads, form.tensor_parallel_size)
        own = (heads + kept) * (cache.head_dim + cache.value_size) * element
        window = cache.chunk if isinstance(cache, ChunkedLocal) else cache.window
    elif isinstance(cache, WINDOWS):
        window = cache.window
    grown = cache.payload_bytes(min(span, window or span), form)
    return Attention(grown // min(span, window or span), pair, chunk_pair, own, window)


def _activation_bytes(served: Served) -> int:
    """Bytes that one token moves between the matrix products of a layer.

    The residual and its norm are read and written twice (fused_add_rms_norm), queries and keys once for the rotation;
    the halves of a gated MLP are read and their product is written (silu_and_mul). vLLM 0.33, csrc/.
    """
    spec, tp = served.spec, served.deployment.tensor_parallel_size
    width = 4 * spec.hidden_size
    if spec.mlp is not None:
        width = spec.mlp.width + spec.mlp.expert_width * spec.mlp.experts_per_token
    rotated = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    elements = 8 * spec.hidden_size + ceil_div(rotated + 3 * width, tp)
    return elements * DTYPE_BYTES[served.deployment.dtype]


def step_flops(served: Served) -> Flops | None:
    """What a step computes on one rank; None where the weights are not known.

    A multiplication and an addition for each weight, and for each element of a key and of a value.
    """
    weights, tp = served.spec.weights, served.deployment.tensor_parallel_size
    active = weights.active_parameters
    if active is None:
        return None
    return Flops(
        per_token=2 * (active - weights.head_parameters) // tp,
        per_logits=2 * weights.head_parameters // tp,
        per_pair=2 * served.spec.num_heads * _attention_width(served) // tp,
    )


def _attention_width(served: Served) -> int:
    """Elements that a token's query is multiplied with and sums up, over all layers, for each head.

    A latent is both key and value, and its rotary part is in the key only.
    """
    width = 0
    for item in served.plan.layers:
        cache = item.cache
        if isinstance(cache, FullAttention):
            width += cache.head_dim + cache.value_size
        elif isinstance(cache, LatentAttention):
            width += 2 * cache.kv_lora_rank + cache.qk_rope_head_dim
    return width
