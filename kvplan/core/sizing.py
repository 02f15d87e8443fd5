"""Bytes of KV cache, blocks and what fits. All byte figures are ints.

Exact: everything derived from the shape of the model and the engine's rules. Estimated: what the engine measures
when it starts (activations, CUDA graphs, runtime), which is given as a range. Every figure is one GPU's unless its
name or docstring says the whole model's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvplan.core.deployment import MARGINS, Deployment, Margin, pipeline_stages
from kvplan.core.kv_cache import WHOLE, CacheFormat, LayerCache
from kvplan.core.kv_pool import Pool
from kvplan.core.lora import lora_bytes
from kvplan.core.model import ModelSpec
from kvplan.core.overhead import Overhead
from kvplan.core.weights import Ranks, Stage
from kvplan.errors import InputError

if TYPE_CHECKING:
    from kvplan.core.concurrency import Residents

#: A length that no sequence reaches: what windows and states come to once they are full.
_ENDLESS = 10**12
#: Tokens over which the growth of compressed caches is whole.
_GROWTH_SPAN = 128


#: Where an overhead comes from: counted and estimated, as a start of the engine measured it, or that carried over to
#: other limits of a batch.
OverheadSource = Literal["estimated", "measured", "scaled"]
#: Whether an estimate is in a verdict, and if so whether both of its ends agree.
Confidence = Literal["exact", "likely", "uncertain"]


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share one block table. ``page_bytes`` is one block of one layer; None where they differ."""

    kind: str
    layers: int
    padded_layers: int
    block_size: int
    page_bytes: int | None
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
    """The ``kv`` block of the JSON contract: the whole model once, and beside it the limiting rank."""

    dtype: str
    block_size: int
    cluster_bytes_per_token: int
    per_gpu: KvBytes


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """The ``weights`` block of the JSON contract: the whole model once, and the largest rank."""

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
class Rank:
    """One stage of the pipeline (all ranks of a stage are alike). ``num_blocks``: before the smallest rank decides.

    ``extra_bytes`` are loaded beside the weights: LoRA slots, rotary tables.
    ``replicated_bytes_per_token`` and ``replicated_weights_bytes``: what of it other ranks of the stage hold too,
    beyond an even share.
    """

    stage: int
    layers: int
    weights_bytes: int | None
    extra_bytes: int
    overhead_bytes: int | None
    available_kv_bytes: int
    bytes_per_token: int
    bytes_per_block: int
    num_blocks: int
    replicated_bytes_per_token: int
    replicated_weights_bytes: int | None


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change to a deployment, in words and as option names with their values, and what would then fit."""

    change: str
    effect: str
    flags: Mapping[str, object]
    fits: bool
    fits_confidence: Confidence
    concurrent_sequences: int
    max_model_len_that_fits: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """What fits, on each GPU unless said. ``headroom`` is what stays free of the KV pool; negative: lacks.

    ``unused_bytes`` is what ``gpu_memory_utilization`` leaves alone, ``taken_kv_bytes`` the blocks of the sequences
    that are asked for.
    """

    fits: bool
    fits_confidence: Confidence
    reason: str
    max_model_len: int
    available_kv_bytes: int
    taken_kv_bytes: int
    unused_bytes: int | None
    overhead_bytes: Overhead | None
    overhead_source: OverheadSource | None
    overhead_is_guess: bool
    num_gpu_blocks: int
    usable_blocks: int
    kv_cache_tokens: int
    max_concurrency: float
    concurrent_sequences: int
    max_model_len_that_fits: int
    headroom_bytes: int
    headroom_share: float | None
    next_block_bytes: int
    sequences_share_of_memory: float | None
    weights_share_of_memory: float | None
    ranks: tuple[Rank, ...]
    limiting_rank: int
    suggestions: tuple[Suggestion, ...]
    distribution: Residents | None
    exact: tuple[str, ...]
    estimated: tuple[str, ...]


def check_tensor_parallel(spec: ModelSpec, size: int) -> None:
    """Refuse a tensor parallel size that vLLM refuses; raises `InputError`.

    config/model.py ``verify_with_parallel_config``; KV heads that neither divide nor are divided are refused where
    their bytes are counted.
    """
    if spec.num_heads % size:
        raise InputError(
            f"{spec.num_heads} attention heads cannot be divided among {size} ranks",
            where="--tensor-parallel-size",
            hint=f"use a size that divides {spec.num_heads}",
        )


class Plan:
    """How the KV cache of a deployment is laid out: the engine's pool, and what of it each stage holds."""

    def __init__(
        self,
        spec: ModelSpec,
        deployment: Deployment,
        make_pool: Callable[[ModelSpec, Deployment, CacheFormat | None], Pool],
        stages: Sequence[Stage] | None = None,
    ) -> None:
        """``make_pool`` is the engine's; ``stages`` replaces its split of the layers."""
        self.spec = spec
        self.deployment = deployment
        self.pool = make_pool(spec, deployment, None)
        self.stages = tuple(stages or pipeline_stages(spec.num_layers, deployment.pipeline_parallel_size))
        #: How caches would be stored if one rank held all of the model.
        self.whole_form = deployment.cache._replace(tensor_parallel_size=1, decode_context_parallel_size=1)
        self._make_pool = make_pool

    @property
    def layers(self) -> tuple[LayerCache, ...]:
        """The caches of the model's layers and of the draft's."""
        return (*self.spec.layers, *self.deployment.drafts)

    def kv_sizes(self, limiting: Stage) -> KvSizes:
        """The ``kv`` block, with the rank of that stage."""
        deployment = self.deployment
        pool = self._make_pool(self.spec, deployment, self.whole_form)
        whole = self._kv_bytes(pool, self.whole_form, None)
        ranks = deployment.tensor_parallel_size
        cluster = sum(self._growth(self.deployment.cache, stage) for stage in self.stages) * ranks
        return KvSizes(
            **{item.name: getattr(whole, item.name) for item in fields(whole)},
            dtype=deployment.cache.kv_cache_dtype,
            block_size=self.pool.block_size,
            cluster_bytes_per_token=math.ceil(cluster),
            per_gpu=self.rank_sizes(limiting),
        )

    def rank_sizes(self, stage: Stage) -> KvBytes:
        """What one rank of a stage holds."""
        return self._kv_bytes(self.pool, self.deployment.cache, stage)

    def loaded(self) -> tuple[int | None, ...]:
        """Bytes on a rank of each stage once the model is loaded, rotary tables and LoRA slots too; None: unknown."""
        held = [stage_weights(self.spec, self.deployment, stage) for stage in self.stages]
        return tuple(
            None if size is None else size + stage_extras(self.spec, self.deployment, stage)
            for size, stage in zip(held, self.stages, strict=True)
        )

    def bytes_per_token(self, stage: Stage) -> int:
        """Growth of a stage's caches per token, once windows are full; rounded up."""
        return math.ceil(self._growth(self.deployment.cache, stage))

    def replicated_bytes_per_token(self, stage: Stage) -> int:
        """Of `bytes_per_token`, what is beyond an even share of the stage; rounded up."""
        share = self._growth(self.whole_form, stage) / self.deployment.tensor_parallel_size
        return math.ceil(self._growth(self.deployment.cache, stage) - share)

    def _kv_bytes(self, pool: Pool, form: CacheFormat, stage: Stage | None) -> KvBytes:
        seq = self.deployment.seq
        caches = [item.cache for item in self.layers if stage is None or stage.holds(item.layer)]
        sequence = sum(cache.payload_bytes(seq, form) for cache in caches)
        block = pool.bytes_per_block(stage)
        return KvBytes(
            bytes_per_token=math.ceil(self._growth(form, stage)),
            fixed_bytes_per_sequence=sum(
                cache.payload_bytes(_ENDLESS, form) for cache in caches if not isinstance(cache, WHOLE)
            ),
            bytes_per_block=block,
            bytes_per_sequence=sequence,
            allocated_bytes_per_sequence=pool.allocated_bytes(seq, stage),
            total_bytes=sequence * self.deployment.concurrency,
            groups=tuple(
                KvGroup(
                    kind="+".join(group.kinds),
                    layers=group.layers,
                    padded_layers=group.padded_layers,
                    block_size=group.block_size,
                    page_bytes=group.page_bytes,
                    blocks_per_sequence=group.blocks_per_sequence,
                )
                for group in pool.groups(seq)
            ),
        )

    def _growth(self, form: CacheFormat, stage: Stage | None) -> Fraction:
        span = _GROWTH_SPAN * form.decode_context_parallel_size
        grown = sum(
            item.cache.payload_bytes(span, form)
            for item in self.layers
            if isinstance(item.cache, WHOLE) and (stage is None or stage.holds(item.layer))
        )
        return Fraction(grown, span)


def stage_weights(spec: ModelSpec, deployment: Deployment, stage: Stage) -> int | None:
    """Bytes of weights on the largest rank of a stage, a draft's included; None if unknown."""
    drafts = deployment.speculative_method == "mtp"
    held = spec.weights.rank_bytes(deployment.dtype, _ranks(spec, deployment), stage, drafts=drafts)
    if held is None:
        return None
    return held + (deployment.draft_weights_bytes if stage.is_last else 0)


def _replicated_weights(plan: Plan, stage: Stage, held: int | None) -> int | None:
    """Of a rank's weights, what is beyond an even share of the stage."""
    deployment = plan.deployment
    alone = deployment._replace(
        cache=deployment.cache._replace(tensor_parallel_size=1),
        data_parallel_size=1,
        enable_expert_parallel=False,
    )
    ranks = deployment.tensor_parallel_size * deployment.data_parallel_size
    whole = held if ranks == 1 else stage_weights(plan.spec, alone, stage)
    return None if held is None or whole is None else max(0, held - -(-whole // ranks))


def weight_sizes(spec: ModelSpec, deployment: Deployment, stages: Sequence[Stage]) -> WeightSizes:
    """Bytes of the weights, in all and on the largest rank."""
    held = [stage_weights(spec, deployment, stage) for stage in stages]
    known = [size for size in held if size is not None]
    return WeightSizes(
        parameters=spec.weights.parameters,
        total_bytes=spec.weights.total_bytes(deployment.dtype),
        per_gpu_bytes=max(known) if len(known) == len(held) else None,
        dtype=deployment.dtype,
        source=spec.weights.source,
    )


def stage_extras(spec: ModelSpec, deployment: Deployment, stage: Stage) -> int:
    """Bytes that are loaded beside the weights of a stage: slots for LoRA adapters, tables of rotary positions.

    Raises `InputError` where the slots cannot be counted.
    """
    extra = spec.weights.rotary_bytes(deployment.dtype)
    if deployment.lora is None:
        return extra
    slots = lora_bytes(
        spec.weights.groups,
        spec.family,
        deployment.dtype,
        deployment.lora,
        ranks=_ranks(spec, deployment),
        stage=stage,
    )
    if slots is None:
        raise InputError(
            "the modules of this model are not known, so slots for adapters cannot be counted",
            where="--enable-lora",
            hint="leave it out, and a margin for them",
        )
    return extra + slots


def _ranks(spec: ModelSpec, deployment: Deployment) -> Ranks:
    """How the ranks of a stage share weights."""
    return Ranks(
        deployment.tensor_parallel_size,
        deployment.data_parallel_size,
        deployment.enable_expert_parallel,
        spec.num_kv_heads,
    )


class Budget(NamedTuple):
    """Where the memory for KV comes from: a GPU's with the overhead of each stage, or what the deployment gives."""

    gpu: GpuBudget | None
    #: Of each stage; empty where KV memory or blocks are given.
    overheads: tuple[Overhead, ...]
    #: Whether they were held against too few logs to trust a yes on which both ends agree.
    is_guess: bool = False
    source: OverheadSource = "estimated"


def plan_capacity(plan: Plan, budget: Budget) -> Capacity:
    """What fits into a GPU's budget, a given KV memory or a given number of blocks.

    ``fits``: the engine starts at ``max_model_len`` and ``concurrency`` sequences of ``seq`` tokens are resident
    at once. The pool says what is left for KV and how many blocks that makes on each rank; the smallest rank
    decides. Raises `InputError` if the weights' size is needed and not known.
    """
    deployment, pool = plan.deployment, plan.pool
    weights = [stage_weights(plan.spec, deployment, stage) for stage in plan.stages]
    by_margin = {margin: _stage_blocks(plan, budget, weights, margin) for margin in MARGINS}
    verdicts = {margin: _verdict(plan, budget, weights, blocks) for margin, blocks in by_margin.items()}
    chosen, blocks = verdicts[deployment.margin], by_margin[deployment.margin]
    num_blocks = max(0, min(item.num_blocks for item in blocks))
    limiting = min(range(len(blocks)), key=lambda i: blocks[i].num_blocks)
    usable = max(0, num_blocks - pool.null_blocks)
    per_sequence = pool.blocks(deployment.seq)
    tokens, concurrency = pool.token_line(num_blocks, deployment.max_model_len)
    spare = usable - deployment.concurrency * per_sequence
    block_bytes = pool.bytes_per_block(plan.stages[limiting])
    memory = budget.gpu.memory_bytes if budget.gpu else None
    total_bytes = plan.rank_sizes(plan.stages[limiting]).total_bytes
    held = weights[limiting]
    available = blocks[limiting].available_kv_bytes
    return Capacity(
        fits=chosen.fits,
        fits_confidence=_confidence(budget, chosen, verdicts.values()),
        reason=chosen.reason,
        max_model_len=deployment.max_model_len,
        available_kv_bytes=available,
        taken_kv_bytes=deployment.concurrency * pool.allocated_bytes(deployment.seq, plan.stages[limiting]),
        unused_bytes=blocks[limiting].unused_bytes,
        overhead_bytes=budget.overheads[limiting] if budget.overheads else None,
        overhead_source=budget.source if budget.overheads else None,
        overhead_is_guess=bool(budget.overheads) and budget.is_guess,
        num_gpu_blocks=num_blocks,
        usable_blocks=usable,
        kv_cache_tokens=tokens,
        max_concurrency=concurrency,
        concurrent_sequences=_at_once(usable, per_sequence, _places(blocks)),
        max_model_len_that_fits=_longest_that_fits(plan, num_blocks),
        headroom_bytes=spare * block_bytes,
        headroom_share=spare / usable if usable else None,
        next_block_bytes=block_bytes - available % block_bytes if block_bytes else 0,
        sequences_share_of_memory=total_bytes / memory if memory else None,
        weights_share_of_memory=held / memory if memory and held is not None else None,
        ranks=tuple(_rank(plan, budget, i, weights[i], blocks[i]) for i in range(len(plan.stages))),
        limiting_rank=limiting,
        suggestions=(),
        distribution=None,
        exact=_EXACT if budget.overheads else (*_EXACT, *_ESTIMATED[1:]),
        estimated=_ESTIMATED if budget.overheads else (),
    )


def _confidence(budget: Budget, chosen: _Verdict, all_margins: Iterable[_Verdict]) -> Confidence:
    if not budget.overheads:
        return "exact"
    agree = all(verdict.fits == chosen.fits for verdict in all_margins)
    return "likely" if agree and not (chosen.fits and budget.is_guess) else "uncertain"


def _rank(plan: Plan, budget: Budget, number: int, weights_bytes: int | None, blocks: _StageBlocks) -> Rank:
    """A stage of the pipeline as a report shows it."""
    deployment, stage = plan.deployment, plan.stages[number]
    return Rank(
        stage=number,
        layers=stage.end - stage.first,
        weights_bytes=weights_bytes,
        extra_bytes=stage_extras(plan.spec, deployment, stage),
        overhead_bytes=budget.overheads[number].total(deployment.margin) if budget.overheads else None,
        available_kv_bytes=blocks.available_kv_bytes,
        bytes_per_token=plan.bytes_per_token(stage),
        bytes_per_block=plan.pool.bytes_per_block(stage),
        num_blocks=max(0, blocks.num_blocks),
        replicated_bytes_per_token=plan.replicated_bytes_per_token(stage),
        replicated_weights_bytes=_replicated_weights(plan, stage, weights_bytes),
    )


_EXACT = ("kv", "weights")
_ESTIMATED = ("overhead_bytes", "available_kv_bytes", "num_gpu_blocks", "kv_cache_tokens", "max_concurrency")


def fits(plan: Plan, budget: Budget) -> bool:
    """``fits`` of `plan_capacity` alone, at a small part of its cost."""
    weights = [stage_weights(plan.spec, plan.deployment, stage) for stage in plan.stages]
    stages = _stage_blocks(plan, budget, weights, plan.deployment.margin)
    return _verdict(plan, budget, weights, stages).fits


class _StageBlocks(NamedTuple):
    available_kv_bytes: int
    num_blocks: int
    pool_bytes: int
    sequences: int | None = None
    #: What the engine leaves to others of a budget.
    unused_bytes: int | None = None


class _Verdict(NamedTuple):
    fits: bool
    reason: str


def _stage_blocks(
    plan: Plan, budget: Budget, weights: Sequence[int | None], margin: Margin
) -> list[_StageBlocks]:
    """Memory for KV and blocks of each stage, at one end of the estimated overhead."""
    deployment, found = plan.deployment, []
    for i, stage in enumerate(plan.stages):
        block = plan.pool.bytes_per_block(stage)
        if deployment.num_gpu_blocks_override is not None:
            blocks = deployment.num_gpu_blocks_override
            found.append(_StageBlocks(blocks * block, blocks, blocks * block))
            continue
        unused = None
        if deployment.kv_cache_memory_bytes is not None:
            available = deployment.kv_cache_memory_bytes
        else:
            assert budget.gpu is not None, "the caller gives some budget"
            held = weights[i]
            if held is None:
                raise InputError(
                    f"the size of the weights is not known: {plan.spec.weights.why_unknown}",
                    where=f"model {plan.spec.name}",
                    hint="give a folder with its *.safetensors files, or --kv-cache-memory-bytes",
                )
            used = held + stage_extras(plan.spec, deployment, stage) + budget.overheads[i].total(margin)
            available = plan.pool.kv_memory(budget.gpu.memory_bytes, used)
            unused = max(0, budget.gpu.memory_bytes - used - available)
        share = plan.pool.share(available, stage)
        found.append(_StageBlocks(available, share.num_blocks, share.pool_bytes, share.sequences, unused))
    return found


def _places(stages: Sequence[_StageBlocks]) -> int | None:
    """Sequences that have a place beside the blocks on every rank; None: no limit but the blocks."""
    return min((item.sequences for item in stages if item.sequences is not None), default=None)


def _at_once(usable: int, per_sequence: int, places: int | None) -> int:
    """Sequences that are resident at once: as many as have blocks and a place beside them."""
    if not per_sequence:
        return places or 0
    return usable // per_sequence if places is None else min(usable // per_sequence, places)


def _verdict(
    plan: Plan, budget: Budget, weights: Sequence[int | None], stages: Sequence[_StageBlocks]
) -> _Verdict:
    """Whether the engine starts and the sequences are resident at once, and what decides it."""
    deployment, pool = plan.deployment, plan.pool
    num_blocks = min(item.num_blocks for item in stages)
    if not budget.overheads and budget.gpu is not None:
        # A given pool bypasses the budget, but not the memory of the GPU.
        for stage, held, item in zip(plan.stages, weights, stages, strict=True):
            # The smallest rank decides how many blocks all have; what is beside the blocks stays.
            spared = (item.num_blocks - num_blocks) * pool.bytes_per_block(stage)
            bytes_needed = (held or 0) + item.pool_bytes - spared
            if bytes_needed > budget.gpu.memory_bytes:
                return _Verdict(
                    False,
                    f"weights and KV need {_gib(bytes_needed)} on each GPU, which has "
                    f"{_gib(budget.gpu.memory_bytes)}",
                )
    usable = num_blocks - pool.null_blocks
    longest = pool.blocks(deployment.max_model_len)
    needed = deployment.concurrency * pool.blocks(deployment.seq)
    length = f"{deployment.seq:,} token{'' if deployment.seq == 1 else 's'}"
    asked = (
        f"1 sequence of {length} needs"
        if deployment.concurrency == 1
        else f"{deployment.concurrency:,} sequences of {length} need"
    )
    if usable < 1:
        lacking = -min(item.available_kv_bytes for item in stages)
        if lacking > 0:
            return _Verdict(
                False,
                f"weights and overhead need {_gib(lacking)} more on a GPU than it gives the engine; nothing is left "
                "for KV",
            )
        beside = " beside the null block" if pool.null_blocks else ""
        return _Verdict(False, f"there is no room for a block of KV{beside}")
    if longest > pool.start_check_blocks(num_blocks):
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
    places = _places(stages)
    if places is not None and deployment.concurrency > places:
        return _Verdict(
            False,
            f"{deployment.concurrency:,} sequences are never resident at once: there are places for the states of "
            f"{places:,}",
        )
    if needed > usable:
        return _Verdict(False, f"{asked} {needed:,} blocks, {usable:,} are usable")
    return _Verdict(True, f"{asked} {needed:,} of {usable:,} usable blocks")


def _gib(size: int) -> str:
    return f"{size / (1 << 30):,.2f} GiB"


def _longest_that_fits(plan: Plan, num_blocks: int) -> int:
    """The longest sequence that the engine would start with, by bisection as the engine itself searches; 0: none."""
    room = plan.pool.start_check_blocks(num_blocks)
    together = plan.pool.block_size * plan.deployment.cache.decode_context_parallel_size
    limit = plan.spec.max_position_embeddings or max(1, room) * together
    longest = max(limit, plan.deployment.max_model_len)
    low, high = 0, longest
    while low < high:
        middle = (low + high + 1) // 2
        if plan.pool.blocks(middle) <= room:
            low = middle
        else:
            high = middle - 1
    return low
