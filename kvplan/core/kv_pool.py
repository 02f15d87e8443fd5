"""The pool of KV memory of one engine: how large a block is and how many a sequence takes.

`VllmPool` is vLLM's, by the rules of a version. Other engines have pools of their own with the same interface, in
`kvplan.core.pools`.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from kvplan.core.deployment import Deployment, pipeline_stages
from kvplan.core.kv_cache import (
    STATES,
    CacheFormat,
    ChunkedLocal,
    FullAttention,
    LatentAttention,
    LatentWindow,
    LayerCache,
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
    make_pages,
    tuple_bytes,
)
from kvplan.core.model import ModelSpec
from kvplan.core.vllm_rules import StateMode, vllm_rules
from kvplan.core.weights import Stage
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

    ``budget`` has the fields ``utilization``, ``weights``, ``extras`` and ``overhead``; ``blocks`` those
    ``available``, ``block`` and ``tokens`` (of a block).
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


class CommonPool:
    """What pools have in common unless they say otherwise: whole blocks of one size, and nothing beside them."""

    null_blocks = 0

    def __init__(self, deployment: Deployment, form: CacheFormat | None) -> None:
        """``form`` replaces the deployment's own, to see the whole model instead of one rank."""
        self._deployment = deployment
        self._form = form or deployment.cache
        self.block_size = deployment.block_size

    def allocated_bytes(self: Pool, length: int, stage: Stage | None = None) -> int:
        """Whole blocks."""
        return self.bytes_per_block(stage) * self.blocks(length)

    def kv_memory(self, memory_bytes: int, used_bytes: int) -> int:
        """What the utilization leaves: ceil(memory x utilization) - used (vLLM v1/worker/gpu_worker.py)."""
        return math.ceil(memory_bytes * self._deployment.gpu_memory_utilization) - used_bytes

    def share(self: Pool, available_bytes: int, stage: Stage) -> Share:
        """Whole blocks (vLLM v1/core/kv_cache_planning.py)."""
        block = self.bytes_per_block(stage)
        blocks = available_bytes // block if block else 1
        return Share(blocks, blocks * block)

    def start_check_blocks(self, num_blocks: int) -> int:
        """All blocks."""
        return num_blocks

    def token_line(self: Pool, num_blocks: int, max_model_len: int) -> tuple[int, float]:
        """Tokens of all blocks, and how many of the longest sequence they hold."""
        return num_blocks * self.block_size, num_blocks / max(1, self.blocks(max_model_len))


class VllmPool(CommonPool):
    """vLLM's pool: blocks shared by groups of layers, by the rules of a version.

    Raises `InputError` for what that version refuses.
    """

    null_blocks = 1
    formulas = Formulas(
        budget="ceil(memory x {utilization}) - weights {weights} - rotary tables and LoRA slots {extras} - "
        "overhead {overhead}",
        block="the widest group's",
        blocks="available // bytes per block = {available} // {block}",
        pages_source="v1/kv_cache_interface.py",
        states_source="model_executor/layers/mamba/mamba_utils.py",
        groups_source="v1/core/kv_cache_planning.py; before 0.33 v1/core/kv_cache_utils.py",
        budget_source="v1/worker/gpu_worker.py",
        overhead_source="counted from shapes and start-up logs, docs/memory.md",
    )

    def __init__(self, spec: ModelSpec, deployment: Deployment, form: CacheFormat | None = None) -> None:
        super().__init__(deployment, form)
        self.rules = vllm_rules(deployment.version)
        layers = [self._stored(item) for item in spec.layers]
        drafts = [self._stored(item) for item in deployment.drafts]
        caches = [item.cache for item in (*layers, *drafts)]
        states = [cache for cache in caches if isinstance(cache, STATES)]
        #: What states are kept of a sequence.
        self.state_mode: StateMode = self.rules.state_mode(
            prefix_caching=deployment.enable_prefix_caching,
            all_mamba=bool(states) and all(isinstance(c, (Mamba1State, Mamba2State)) for c in states),
            drafts=deployment.cache.num_speculative_tokens > 0,
        )
        self.checkpointed, checkpoint_tokens = self.rules.checkpoints(
            self.state_mode,
            tuple(dict.fromkeys(cache.kind for cache in states)),
            deployment.compute_capability,
        )
        self.block_size = hybrid_block_size(
            layers,
            self._form,
            deployment.block_size,
            multiple=self.rules.state_block_multiple(
                self.state_mode,
                deployment.block_size,
                has_latent=any(isinstance(cache, LatentAttention) for cache in caches),
                chunk_size=spec.mamba_chunk_size,
                checkpoint_tokens=checkpoint_tokens,
            ),
        )
        local = any(isinstance(cache, ChunkedLocal) for cache in caches)
        self._group_rules = self.rules.group_rules(
            hybrid_manager=deployment.hybrid_kv_cache_manager
            and not (local and self.rules.chunked_keep_all_tokens(drafts=bool(deployment.drafts)))
        )._replace(refuses=form is None)
        self.page_groups: tuple[PageGroup, ...] = form_groups(
            make_pages(
                layers,
                self._form,
                self.block_size,
                state_block_size=deployment.max_model_len if self.state_mode == "none" else self.block_size,
                drafts=drafts,
            ),
            self._form,
            self._group_rules,
        )
        self._check_context()
        self._stages = pipeline_stages(spec.num_layers, deployment.pipeline_parallel_size)
        #: Tokens scheduled and not yet settled.
        self.tokens_in_flight = self.rules.tokens_in_flight(
            deployment.max_num_batched_tokens,
            pipeline_parallel_size=deployment.pipeline_parallel_size,
            async_scheduling=deployment.async_scheduling,
            runner_v2=self.rules.runner_v2(
                spec.architecture,
                deployment.speculative_method,
                has_states=bool(states),
                has_experts=spec.has_experts,
            ),
        )

    def _stored(self, item: LayerCache) -> LayerCache:
        """The cache as this version stores it: older ones give values the size of keys (kv_cache_interface.py)."""
        cache = item.cache
        widened = (SlidingWindow,) if self.rules.number >= (0, 19) else (SlidingWindow, FullAttention)
        if self.rules.number < (0, 21) and isinstance(cache, widened):
            return item._replace(cache=cache._replace(value_head_dim=None))
        return item

    def _check_context(self) -> None:
        """Refuse what vLLM refuses of decode context parallelism."""
        if self._deployment.cache.decode_context_parallel_size == 1:
            return
        caches = [page.cache for group in self.page_groups for page in group.pages]
        windows = any(isinstance(cache, (SlidingWindow, LatentWindow)) for cache in caches)
        several = len(self.page_groups) > 1 and self.rules.number < (0, 26)
        if windows or several or self.rules.number < (0, 11):
            what = "sliding windows" if windows else "layers of several kinds" if several else "this version"
            raise InputError(
                f"decode context parallelism does not go with {what}",
                where="--decode-context-parallel-size",
                hint="leave it out",
            )

    def bytes_per_block(self, stage: Stage | None = None) -> int:
        """Bytes of one block, in all layers or in those of a stage; raises `InputError` for a stage without any."""
        size = bytes_per_block(self.page_groups, self._group_rules, self._layers(stage))
        if self.page_groups and not size:
            raise InputError(
                "a stage of the pipeline has no layer with a cache, which vLLM cannot serve",
                where="--pipeline-parallel-size",
                hint="use fewer stages",
            )
        return size

    def _layers(self, stage: Stage | None) -> set[int] | None:
        """The layers of a stage that have a cache; None: all."""
        if stage is None:
            return None
        return {page.layer for group in self.page_groups for page in group.pages if stage.holds(page.layer)}

    def blocks(self, length: int) -> int:
        """Blocks that a sequence is given at most: every group takes its own."""
        return blocks_per_sequence(self.page_groups, self._need(length), self._form)

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
        """All blocks, without the null block where the version leaves it out.

        With DeepSeek-V4's groups, older versions check against larger blocks than they then have: as many pages
        of every size as of the most frequent.
        """
        if self.rules.reserves_null_block:
            return num_blocks - 1
        if (
            self._group_rules.packing != "widest"
            and len({group.page_bytes for group in self.page_groups}) > 1
        ):
            return min(
                num_blocks * self.bytes_per_block(stage) // tuple_bytes(self.page_groups, self._layers(stage))
                for stage in self._stages
            )
        return num_blocks

    def token_line(self, num_blocks: int, max_model_len: int) -> tuple[int, float]:
        """Tokens and concurrency of the start-up line.

        The floats are multiplied as vLLM does (v1/core/kv_cache_utils.py), so that truncation agrees.
        """
        blocks = self._blocks_of_line(max_model_len)
        concurrency = num_blocks / blocks if blocks else 0.0
        if self.rules.token_line == "concurrency":
            return int(concurrency * max_model_len), concurrency
        smallest = min((group.block_size for group in self.page_groups), default=0)
        if self.rules.token_line == "blocks":
            tokens = num_blocks * smallest
            return tokens, tokens / max_model_len
        tokens = num_blocks // max(1, len(self.page_groups)) * smallest
        return tokens * self._deployment.cache.decode_context_parallel_size, concurrency

    def _blocks_of_line(self, length: int) -> int:
        """Blocks of a sequence as the start-up line counts them.

        Until 0.32 they are the bytes of all groups' blocks divided by those of the first group's, on the first
        stage: the same unless groups have pages of several sizes (``get_max_concurrency_for_kv_cache_config``).
        """
        sizes = {group.page_bytes for group in self.page_groups}
        if self._group_rules.packing == "widest" or len(self.page_groups) < 2 or len(sizes) == 1:
            return self.blocks(length)
        layers, need = self._layers(self._stages[0]), self._need(length)
        # A group without a layer in the stage keeps the form it has in the whole model.
        sized = [
            (group.bytes_per_block(layers) or group.bytes_per_block(), group) for group in self.page_groups
        ]
        held = sum(size * group.blocks(need, self._form) for size, group in sized)
        return -(-held // sized[0][0])

    def _need(self, length: int) -> Reservation:
        blocks = self.rules.state_blocks(self.state_mode, self._form.num_speculative_tokens)
        if self.state_mode == "all":
            blocks += -(-length // self.block_size)
        return Reservation(
            length=length,
            in_flight=self.tokens_in_flight,
            extra=self.extra_tokens,
            state_blocks=blocks,
            checkpointed=self.checkpointed,
        )

    @property
    def extra_tokens(self) -> int:
        """Tokens kept below a window for multi-token prediction with several modules (config/vllm.py)."""
        tokens = self._form.num_speculative_tokens
        modules = len({item.layer for item in self._deployment.drafts})
        several = self._deployment.speculative_method == "mtp" and min(modules, tokens) > 1
        return tokens - 1 if several and self.rules.number >= (0, 33) else 0
