"""Bytes of KV cache, blocks and what fits, by the rules of vLLM 0.33. All byte figures are ints.

Exact: everything derived from the shape of the model. Estimated: what the engine measures when it starts
(activations, CUDA graphs, runtime), which is given as a range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from kvplan.core.model import KV_DTYPE_BYTES, ModelSpec, kv_heads_per_rank
from kvplan.core.weights import DTYPE_BYTES
from kvplan.errors import InputError

Margin = Literal["low", "mid", "high"]

ENGINE = "vllm"
ENGINE_VERSION = "0.33"

#: Defaults of vLLM 0.33 (config/cache.py, engine/arg_utils.py).
DEFAULT_BLOCK_SIZE = 16
DEFAULT_GPU_MEMORY_UTILIZATION = 0.92

_GIB = 1 << 30


class Deployment(NamedTuple):
    """How a model is served. ``max_model_len`` and ``seq`` are in tokens, ``dtype`` is never "auto" here."""

    seq: int
    max_model_len: int
    dtype: str
    kv_cache_dtype: str
    concurrency: int = 1
    tensor_parallel_size: int = 1
    block_size: int = DEFAULT_BLOCK_SIZE
    gpu_memory_utilization: float = DEFAULT_GPU_MEMORY_UTILIZATION
    max_num_seqs: int = 256
    enforce_eager: bool = False
    margin: Margin = "mid"
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share one block table. ``page_bytes`` is one block of one layer."""

    kind: str
    layers: int
    padded_layers: int
    block_size: int
    page_bytes: int
    blocks_per_sequence: int


@dataclass(frozen=True, slots=True)
class KvBytes:
    """KV bytes of one extent: the whole model once, or one rank."""

    bytes_per_token: int
    fixed_bytes_per_sequence: int
    bytes_per_block: int
    bytes_per_sequence: int
    allocated_bytes_per_sequence: int
    total_bytes: int
    groups: tuple[KvGroup, ...]


@dataclass(frozen=True, slots=True)
class KvSizes(KvBytes):
    """The ``kv`` block of the JSON contract: the whole model once, and beside it one rank."""

    dtype: str
    block_size: int
    cluster_bytes_per_token: int
    per_gpu: KvBytes


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """The ``weights`` block of the JSON contract."""

    parameters: int | None
    total_bytes: int | None
    per_gpu_bytes: int | None
    dtype: str
    source: str


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """The ``gpu`` block: ``count`` GPUs of ``memory_bytes`` each, as ``memory_source`` says."""

    name: str
    count: int
    memory_bytes: int
    memory_source: str


@dataclass(frozen=True, slots=True)
class Overhead:
    """Bytes on each GPU beside weights and KV: a rough estimate, ``low`` to ``high`` for the sum."""

    activations: int
    cuda_graphs: int
    runtime: int
    low: int
    high: int

    def total(self, margin: Margin) -> int:
        """The sum at that end of the range."""
        if margin == "low":
            return self.low
        return self.high if margin == "high" else self.activations + self.cuda_graphs + self.runtime


@dataclass(frozen=True, slots=True)
class Rank:
    """One stage of the pipeline (all ranks of a stage are alike)."""

    stage: int
    layers: int
    weights_bytes: int | None
    bytes_per_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """What fits, on each GPU unless said. ``headroom`` is what stays free of the KV pool; negative: lacks."""

    fits: bool
    fits_confidence: Literal["exact", "likely", "uncertain"]
    reason: str
    max_model_len: int
    available_kv_bytes: int
    overhead_bytes: Overhead | None
    num_gpu_blocks: int
    usable_blocks: int
    kv_cache_tokens: int
    max_concurrency: float
    concurrent_sequences: int
    max_model_len_that_fits: int
    headroom_bytes: int
    headroom_share: float | None
    sequences_share_of_memory: float | None
    weights_share_of_memory: float | None
    ranks: tuple[Rank, ...]
    limiting_rank: int
    suggestions: tuple[dict[str, str], ...]
    exact: tuple[str, ...]
    estimated: tuple[str, ...]


def check_tensor_parallel(spec: ModelSpec, size: int) -> None:
    """Refuse a tensor parallel size that vLLM refuses; raises `InputError`."""
    if spec.num_heads % size:
        raise InputError(
            f"{spec.num_heads} attention heads cannot be divided among {size} ranks",
            where="--tensor-parallel-size",
            hint=f"use a size that divides {spec.num_heads}",
        )
    kv_heads_per_rank(spec.num_kv_heads, size)


def kv_sizes(spec: ModelSpec, deployment: Deployment) -> KvSizes:
    """KV bytes of a model with full attention. Raises `InputError` for kinds that cannot be sized yet."""
    tp = deployment.tensor_parallel_size
    whole, rank = _kv_bytes(spec, deployment, 1), _kv_bytes(spec, deployment, tp)
    return KvSizes(
        **{item.name: getattr(whole, item.name) for item in fields(whole)},
        dtype=deployment.kv_cache_dtype,
        block_size=deployment.block_size,
        cluster_bytes_per_token=rank.bytes_per_token * tp,
        per_gpu=rank,
    )


def _kv_bytes(spec: ModelSpec, deployment: Deployment, tensor_parallel_size: int) -> KvBytes:
    """What one of so many ranks holds; of one: the whole model."""
    element = KV_DTYPE_BYTES[deployment.kv_cache_dtype]
    block_size = deployment.block_size
    blocks = blocks_for(deployment.seq, block_size)
    per_token = [(a, a.bytes_per_token(element, tensor_parallel_size)) for a in spec.full_attention]
    bytes_per_token = sum(size for _, size in per_token)
    sequence = bytes_per_token * deployment.seq
    return KvBytes(
        bytes_per_token=bytes_per_token,
        fixed_bytes_per_sequence=0,  # full attention keeps nothing of fixed size
        bytes_per_block=bytes_per_token * block_size,
        bytes_per_sequence=sequence,
        allocated_bytes_per_sequence=bytes_per_token * block_size * blocks,
        total_bytes=sequence * deployment.concurrency,
        groups=tuple(
            KvGroup(
                kind=a.kind,
                layers=a.layers,
                padded_layers=a.layers,
                block_size=block_size,
                page_bytes=size * block_size // a.layers,
                blocks_per_sequence=blocks,
            )
            for a, size in per_token
        ),
    )


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold ``tokens`` tokens."""
    return -(-tokens // block_size)


def weight_sizes(spec: ModelSpec, deployment: Deployment) -> WeightSizes:
    """Bytes of the weights, in all and on one rank."""
    return WeightSizes(
        parameters=spec.weights.parameters,
        total_bytes=spec.weights.total_bytes(deployment.dtype),
        per_gpu_bytes=spec.weights.per_gpu_bytes(
            deployment.dtype, deployment.tensor_parallel_size, spec.num_kv_heads
        ),
        dtype=deployment.dtype,
        source=spec.weights.source,
    )


def estimate_overhead(spec: ModelSpec, deployment: Deployment, max_num_batched_tokens: int) -> Overhead:
    """A rough estimate of what the engine measures when it starts, in bytes on each GPU.

    Read off start-up logs of vLLM 0.17 to 0.19 on H100 (llm-d-planner, accuracy/results): the peak is the
    sampler's, about 14.4 bytes for each sequence and vocabulary entry, or that of the forward pass, about nine
    times the hidden states (a gated MLP's halves and their product, 2.7 to 3.5 times as wide), plus two copies
    of them; CUDA graphs take about 0.25 GiB and 18 MiB a layer; the runtime 0.25 GiB, with several ranks 2.1 GiB.
    ``low`` and ``high`` are 0.6 and 1.5 times the sum, wide enough for every one of those logs;
    benchmarks/overhead_against_logs.py compares.
    """
    tokens = max_num_batched_tokens
    sampler = 144 * deployment.max_num_seqs * spec.vocab_size // 10
    hidden = tokens * spec.hidden_size * DTYPE_BYTES[deployment.dtype]
    forward = 9 * hidden // deployment.tensor_parallel_size
    activations = max(sampler, forward) + 2 * hidden
    graphs = 0 if deployment.enforce_eager else _GIB // 4 + spec.num_layers * 18 * (1 << 20)
    runtime = _GIB // 4 if deployment.tensor_parallel_size == 1 else 21 * _GIB // 10
    total = activations + graphs + runtime
    return Overhead(activations, graphs, runtime, low=total * 6 // 10, high=total * 15 // 10)


def plan_capacity(
    spec: ModelSpec,
    deployment: Deployment,
    kv: KvSizes,
    weights: WeightSizes,
    *,
    gpu: GpuBudget | None,
    max_num_batched_tokens: int,
) -> Capacity:
    """What fits into a GPU's budget, a given KV memory or a given number of blocks.

    ``fits``: the engine starts at ``max_model_len`` and ``concurrency`` sequences of ``seq`` tokens are resident
    at once. vLLM 0.33: requested = ceil(memory x utilization) (v1/worker/gpu_worker.py), blocks =
    available // bytes per block with one null block (v1/core/kv_cache_utils.py). Raises `InputError` if the weights'
    size is needed and not known.
    """
    overhead: Overhead | None = None
    if deployment.num_gpu_blocks_override is not None:
        blocks = dict.fromkeys(_MARGINS, deployment.num_gpu_blocks_override)
        available = deployment.num_gpu_blocks_override * kv.per_gpu.bytes_per_block
    elif deployment.kv_cache_memory_bytes is not None:
        available = deployment.kv_cache_memory_bytes
        blocks = dict.fromkeys(_MARGINS, available // kv.per_gpu.bytes_per_block)
    else:
        assert gpu is not None, "the caller gives some budget"
        if weights.per_gpu_bytes is None:
            raise InputError(
                "the size of the weights is not known",
                where=f"model {spec.name}",
                hint="give a folder with its *.safetensors files, or --kv-cache-memory-bytes",
            )
        overhead = estimate_overhead(spec, deployment, max_num_batched_tokens)
        left = math.ceil(gpu.memory_bytes * deployment.gpu_memory_utilization) - weights.per_gpu_bytes
        available = left - overhead.total(deployment.margin)
        blocks = {m: max(0, (left - overhead.total(m)) // kv.per_gpu.bytes_per_block) for m in _MARGINS}
    verdicts = {m: _verdict(count, deployment) for m, count in blocks.items()}
    if overhead is None and gpu is not None and weights.per_gpu_bytes is not None:
        needed = weights.per_gpu_bytes + blocks[deployment.margin] * kv.per_gpu.bytes_per_block
        if needed > gpu.memory_bytes:  # a given pool bypasses the budget, not the memory
            too_much = _Verdict(
                False, f"weights and KV need {needed:,} bytes on each GPU, which has {gpu.memory_bytes:,}"
            )
            verdicts = dict.fromkeys(_MARGINS, too_much)
    chosen = verdicts[deployment.margin]
    num_blocks = blocks[deployment.margin]
    usable = max(0, num_blocks - 1)
    per_sequence = blocks_for(deployment.seq, deployment.block_size)
    spare = usable - deployment.concurrency * per_sequence
    concurrency = num_blocks / blocks_for(deployment.max_model_len, deployment.block_size)
    limit = spec.max_position_embeddings or usable * deployment.block_size
    memory = gpu.memory_bytes if gpu else None
    return Capacity(
        fits=chosen.fits,
        fits_confidence="exact"
        if overhead is None
        else "likely"
        if len({v.fits for v in verdicts.values()}) == 1
        else "uncertain",
        reason=chosen.reason,
        max_model_len=deployment.max_model_len,
        available_kv_bytes=available,
        overhead_bytes=overhead,
        num_gpu_blocks=num_blocks,
        usable_blocks=usable,
        # vLLM multiplies the float too (v1/core/kv_cache_utils.py), so this is its figure to the token.
        kv_cache_tokens=int(concurrency * deployment.max_model_len),
        max_concurrency=concurrency,
        concurrent_sequences=usable // per_sequence,
        max_model_len_that_fits=min(usable * deployment.block_size, max(limit, deployment.max_model_len)),
        headroom_bytes=spare * kv.per_gpu.bytes_per_block,
        headroom_share=spare / usable if usable else None,
        sequences_share_of_memory=kv.per_gpu.total_bytes / memory if memory else None,
        weights_share_of_memory=weights.per_gpu_bytes / memory if memory and weights.per_gpu_bytes else None,
        ranks=(Rank(0, spec.num_layers, weights.per_gpu_bytes, kv.per_gpu.bytes_per_block, num_blocks),),
        limiting_rank=0,
        suggestions=(),  # none was asked for
        exact=_EXACT if overhead is not None else (*_EXACT, *_ESTIMATED[1:]),
        estimated=_ESTIMATED if overhead is not None else (),
    )


_MARGINS: tuple[Margin, ...] = ("low", "mid", "high")
_EXACT = ("kv", "weights")
_ESTIMATED = ("overhead_bytes", "available_kv_bytes", "num_gpu_blocks", "kv_cache_tokens", "max_concurrency")


class _Verdict(NamedTuple):
    fits: bool
    reason: str


def _verdict(num_blocks: int, deployment: Deployment) -> _Verdict:
    usable = num_blocks - 1
    longest = blocks_for(deployment.max_model_len, deployment.block_size)
    needed = deployment.concurrency * blocks_for(deployment.seq, deployment.block_size)
    if num_blocks <= 1:
        return _Verdict(False, "there is no room for a block of KV beside the null block")
    if longest > usable:
        return _Verdict(
            False,
            f"a sequence of max_model_len {deployment.max_model_len:,} needs "
            f"{longest:,} blocks, {usable:,} are usable",
        )
    if deployment.concurrency > deployment.max_num_seqs:
        return _Verdict(
            False,
            f"{deployment.concurrency:,} sequences are never resident at once: max_num_seqs is "
            f"{deployment.max_num_seqs:,}",
        )
    if needed > usable:
        return _Verdict(
            False,
            f"{deployment.concurrency:,} sequences of {deployment.seq:,} tokens need {needed:,} blocks, "
            f"{usable:,} are usable",
        )
    return _Verdict(
        True,
        f"{deployment.concurrency:,} sequences of {deployment.seq:,} tokens need {needed:,} of "
        f"{usable:,} usable blocks",
    )


def default_batch_limits(memory_bytes: int | None, gpu_name: str) -> tuple[int, int]:
    """``(max_num_batched_tokens, max_num_seqs)`` that vLLM 0.33 starts from for a server on this GPU.

    engine/arg_utils.py ``get_batch_defaults``: 160 GiB and more 16384 and 1024; 70 GiB and more, but not A100, 8192
    and 1024; else, and without a known GPU, 2048 and 256.
    """
    memory = memory_bytes or 0
    if memory >= 160 * _GIB:
        return 16384, 1024
    if memory >= 70 * _GIB and "a100" not in gpu_name.lower():
        return 8192, 1024
    return 2048, 256


def explain(
    spec: ModelSpec, deployment: Deployment, kv: KvSizes, weights: WeightSizes, capacity: Capacity | None
) -> list[str]:
    """Each formula with this model's numbers, a line each; the last one is the verdict or the total."""
    element = KV_DTYPE_BYTES[deployment.kv_cache_dtype]
    tp = deployment.tensor_parallel_size
    lines = [
        f"bytes per token = layers x KV heads x (key + value size) x element bytes = "
        f"{a.layers} x {a.num_kv_heads} x ({a.head_dim} + {a.value_size}) x {element} = {a.bytes_per_token(element):,}"
        for a in spec.full_attention
    ]
    lines.append(
        f"bytes per block = bytes per token x block size = {kv.bytes_per_token:,} x {kv.block_size} = "
        f"{kv.bytes_per_block:,}"
    )
    lines.append(
        f"bytes per sequence = bytes per token x tokens = {kv.bytes_per_token:,} x {deployment.seq:,} = "
        f"{kv.bytes_per_sequence:,}"
    )
    if tp > 1:
        heads = kv_heads_per_rank(spec.num_kv_heads, tp)
        lines.append(
            f"per GPU: max(1, {spec.num_kv_heads} KV heads // {tp} ranks) = {heads} heads, "
            f"{kv.per_gpu.bytes_per_token:,} bytes per token, {kv.per_gpu.bytes_per_block:,} per block"
        )
    if weights.total_bytes is not None and weights.parameters is not None:
        lines.append(
            f"weights = {weights.parameters:,} parameters = {weights.total_bytes:,} bytes ({weights.source}), "
            f"{weights.per_gpu_bytes:,} per GPU"
        )
    total = (
        f"total = bytes per sequence x concurrency = {kv.bytes_per_sequence:,} x {deployment.concurrency:,} = "
        f"{kv.total_bytes:,}"
    )
    lines.append(total)
    if capacity is not None:
        lines += _explain_capacity(deployment, kv, weights, capacity)
    return lines


def _explain_capacity(
    deployment: Deployment, kv: KvSizes, weights: WeightSizes, capacity: Capacity
) -> list[str]:
    lines = []
    overhead = capacity.overhead_bytes
    if overhead is not None:
        lines.append(
            f"overhead ({deployment.margin}, estimated) = activations {overhead.activations:,} + CUDA graphs "
            f"{overhead.cuda_graphs:,} + runtime {overhead.runtime:,}; from {overhead.low:,} to {overhead.high:,}"
        )
        lines.append(
            f"available for KV = ceil(memory x {deployment.gpu_memory_utilization}) - weights "
            f"{weights.per_gpu_bytes:,} - overhead {overhead.total(deployment.margin):,} = "
            f"{capacity.available_kv_bytes:,}"
        )
    lines.append(
        f"blocks = available // bytes per block = {capacity.available_kv_bytes:,} // {kv.per_gpu.bytes_per_block:,} = "
        f"{capacity.num_gpu_blocks:,}, one of them the null block"
    )
    lines.append(f"fits: {'yes' if capacity.fits else 'no'}: {capacity.reason}")
    return lines
