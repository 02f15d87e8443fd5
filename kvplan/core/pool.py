"""The pool of KV memory of one engine: how large a block is and how many a sequence takes.

`VllmPool` is vLLM's, by the rules of a version. Other engines have pools of their own with the same interface, in
`kvplan.core.pools`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvplan.core.deployment import Deployment, Stage
from kvplan.core.kv_cache import (
    STATES,
    Cache,
    CacheFormat,
    ChunkedLocal,
    LatentAttention,
    LatentWindow,
    Mamba1State,
    Mamba2State,
    Reservation,
    SlidingWindow,
)
from kvplan.core.kv_groups import (
    PageGroup,
    blocks_per_sequence,
    bytes_per_block,
    form_groups,
    hybrid_block_size,
    is_packed,
    make_pages,
    padded_bytes_per_block,
)
from kvplan.core.model import ModelSpec
from kvplan.core.vllm_rules import StateMode, vllm_rules
from kvplan.errors import InputError


class GroupSize(NamedTuple):
    """A group of layers as a report shows it. ``page_bytes`` is one block of one layer; None where they differ."""

    kinds: tuple[str, ...]
    layers: int
    padded_layers: int
    block_size: int
    page_bytes: int | None
    blocks_per_sequence: int


class Share(NamedTuple):
    """What a pool makes of its memory on one rank.

    ``pool_bytes`` is what it takes, which some engines round up beyond the memory given. ``sequences`` is how many
    have a place in what is kept beside the blocks, such as states; None: as many as the blocks allow.
    """

    num_blocks: int
    pool_bytes: int
    sequences: int | None = None


class Formulas(NamedTuple):
    """How a pool reckons, in words, and the files of the engine that say so; for explanations.

    ``budget`` has the fields ``utilization``, ``weights`` and ``overhead``; ``blocks`` those ``available``, ``block``
    and ``tokens`` (of a block).
    """

    budget: str
    block: str
    blocks: str
    pages_source: str
    states_source: str
    groups_source: str
    budget_source: str
    overhead_source: str


class Pool(Protocol):
    """What sizing asks of an engine. Lengths are tokens, sizes bytes on one rank."""

    @property
    def formulas(self) -> Formulas:
        """Its rules in words."""

    @property
    def block_size(self) -> int:
        """Tokens in a block of the layers that keep all of them."""

    @property
    def null_blocks(self) -> int:
        """Blocks that no sequence is given."""

    def bytes_per_block(self, stage: Stage | None = None) -> int:
        """Bytes of one block in all layers, or in those of a stage."""

    def blocks(self, length: int) -> int:
        """Blocks that a sequence of this length is given at most."""

    def allocated_bytes(self, length: int, stage: Stage | None = None) -> int:
        """Bytes that a sequence of this length holds: whole blocks, and what is kept beside them."""

    def kv_memory(self, memory_bytes: int, used_bytes: int) -> int:
        """Memory for KV of a GPU's, where ``used_bytes`` are taken by weights and overhead; may be negative."""

    def share(self, available_bytes: int, stage: Stage) -> Share:
        """What a stage makes of so much memory for KV."""

    def groups(self, length: int) -> tuple[GroupSize, ...]:
        """The groups, with their blocks for a sequence of this length."""

    def start_check_blocks(self, num_blocks: int) -> int:
        """Blocks that the engine's own check at the start counts on."""

    def token_line(self, num_blocks: int, max_model_len: int) -> tuple[int, float]:
        """``(tokens, concurrency)`` as the engine prints them for its longest sequence."""


class VllmPool:
    """vLLM's pool: blocks shared by groups of layers, by the rules of a version.

    Raises `InputError` for what that version refuses.
    """

    def __init__(self, spec: ModelSpec, deployment: Deployment, form: CacheFormat | None = None) -> None:
        """``form`` replaces the deployment's own, to see the whole model instead of one rank."""
        self._deployment = deployment
        self.rules = vllm_rules(deployment.version)
        self._form = form or deployment.cache
        layers = [*spec.layers, *deployment.drafts]
        caches = [item.cache for item in layers]
        states = [cache for cache in caches if isinstance(cache, STATES)]
        kinds = tuple(dict.fromkeys(cache.kind for cache in states))
        self._mode: StateMode = self.rules.state_mode(
            prefix_caching=deployment.enable_prefix_caching,
            all_mamba=bool(states) and all(isinstance(c, (Mamba1State, Mamba2State)) for c in states),
            drafts=deployment.cache.num_speculative_tokens > 0,
        )
        self._checkpointed, alignment = self.rules.checkpoints(
            self._mode, kinds, deployment.compute_capability
        )
        multiple = self.rules.state_block_multiple(
            self._mode,
            has_latent=any(isinstance(cache, LatentAttention) for cache in caches),
            chunk_size=spec.mamba_chunk_size,
        )
        self.block_size = hybrid_block_size(
            layers, deployment.cache, deployment.block_size, multiples=(multiple, alignment)
        )
        self._check(caches)
        rules = self.rules.group_rules(
            hybrid_manager=deployment.hybrid_kv_cache_manager
            and not (
                any(isinstance(cache, ChunkedLocal) for cache in caches)
                and self.rules.chunked_keep_all_tokens(drafts=bool(deployment.drafts))
            )
        )
        self.page_groups: tuple[PageGroup, ...] = form_groups(
            make_pages(layers, self._form, self.block_size), self._form, rules
        )
        self._in_flight = self.rules.tokens_in_flight(
            deployment.max_num_batched_tokens,
            pipeline_parallel_size=deployment.pipeline_parallel_size,
            async_scheduling=deployment.async_scheduling,
            runner_v2=self._runs_on_v2(spec, has_states=bool(states)),
        )

    null_blocks = 1
    formulas = Formulas(
        budget="ceil(memory x {utilization}) - weights {weights} - overhead {overhead}",
        block="the widest group's",
        blocks="available // bytes per block = {available} // {block}",
        pages_source="v1/kv_cache_interface.py",
        states_source="model_executor/layers/mamba/mamba_utils.py",
        groups_source="v1/core/kv_cache_planning.py; before 0.33 v1/core/kv_cache_utils.py",
        budget_source="v1/worker/gpu_worker.py",
        overhead_source="counted from shapes and start-up logs, docs/memory.md",
    )

    def _check(self, caches: Sequence[Cache]) -> None:
        """Refuse what vLLM refuses of decode context parallelism."""
        if self._deployment.cache.decode_context_parallel_size == 1:
            return
        if any(isinstance(cache, (SlidingWindow, LatentWindow)) for cache in caches):
            raise InputError(
                "decode context parallelism does not go with sliding windows",
                where="--decode-context-parallel-size",
                hint="leave it out",
            )

    def _runs_on_v2(self, spec: ModelSpec, *, has_states: bool) -> bool:
        """Whether the second model runner is the default: dense models without states first, all since 0.33."""
        if self.rules.number >= (0, 33):
            return True
        return not has_states and not (spec.mlp is not None and spec.mlp.expert_width)

    @property
    def state_mode(self) -> StateMode:
        """What states are kept of a sequence."""
        return self._mode

    @property
    def tokens_in_flight(self) -> int:
        """Tokens scheduled and not yet settled."""
        return self._in_flight

    def bytes_per_block(self, stage: Stage | None = None) -> int:
        """Bytes of one block: of the widest group, in all layers or in those of a stage."""
        layers: set[int] | None = None
        if stage is not None:
            pages = (page for group in self.page_groups for page in group.pages)
            layers = {page.layer for page in pages if stage.holds(page.layer)}
        if self.rules.pads_packed_groups and is_packed(self.page_groups):
            return padded_bytes_per_block(self.page_groups, layers)
        return bytes_per_block(self.page_groups, layers)

    def blocks(self, length: int) -> int:
        """Blocks that a sequence is given at most: every group takes its own."""
        return blocks_per_sequence(self.page_groups, self._need(length), self._form)

    def allocated_bytes(self, length: int, stage: Stage | None = None) -> int:
        """Whole blocks: there is nothing beside them."""
        return self.bytes_per_block(stage) * self.blocks(length)

    def kv_memory(self, memory_bytes: int, used_bytes: int) -> int:
        """What the utilization leaves: ceil(memory x utilization) - used (v1/worker/gpu_worker.py)."""
        return math.ceil(memory_bytes * self._deployment.gpu_memory_utilization) - used_bytes

    def share(self, available_bytes: int, stage: Stage) -> Share:
        """Whole blocks (v1/core/kv_cache_planning.py)."""
        block = self.bytes_per_block(stage)
        blocks = available_bytes // block if block else 1
        return Share(blocks, blocks * block)

    def groups(self, length: int) -> tuple[GroupSize, ...]:
        """The groups, with their blocks for a sequence of this length."""
        need = self._need(length)
        return tuple(
            GroupSize(
                kinds=group.kinds,
                layers=len(group.pages),
                padded_layers=group.padded_layers,
                block_size=group.block_size,
                page_bytes=group.page_bytes,
                blocks_per_sequence=group.blocks(need, self._form),
            )
            for group in self.page_groups
        )

    def start_check_blocks(self, num_blocks: int) -> int:
        """All blocks, without the null block where the version leaves it out."""
        return num_blocks - 1 if self.rules.reserves_null_block else num_blocks

    def token_line(self, num_blocks: int, max_model_len: int) -> tuple[int, float]:
        """Tokens and concurrency of the start-up line.

        The floats are multiplied as vLLM does (v1/core/kv_cache_utils.py), so that truncation agrees.
        """
        blocks = self.blocks(max_model_len)
        concurrency = num_blocks / blocks if blocks else 0.0
        if self.rules.token_line == "concurrency":
            return int(concurrency * max_model_len), concurrency
        smallest = min((group.block_size for group in self.page_groups), default=0)
        if self.rules.token_line == "blocks":
            tokens = num_blocks * smallest
            return tokens, tokens / max_model_len
        tokens = num_blocks // max(1, len(self.page_groups)) * smallest
        return tokens * self._deployment.cache.decode_context_parallel_size, concurrency

    def _need(self, length: int) -> Reservation:
        blocks = self.rules.state_blocks(self._mode, self._form.num_speculative_tokens)
        if self._mode == "all":
            blocks += -(-length // self.block_size)
        return Reservation(
            length=length,
            in_flight=self._in_flight,
            extra=self._extra_tokens(),
            state_blocks=blocks,
            checkpointed=self._checkpointed,
        )

    def _extra_tokens(self) -> int:
        """Tokens kept below a window for multi-token prediction with several modules (config/vllm.py)."""
        tokens = self._form.num_speculative_tokens
        modules = len({item.layer for item in self._deployment.drafts})
        several = self._deployment.speculative_method == "mtp" and min(modules, tokens) > 1
        return tokens - 1 if several and self.rules.number >= (0, 33) else 0
