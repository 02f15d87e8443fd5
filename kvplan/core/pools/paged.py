"""The plain formula of the vLLM paper (Kwon et al. 2023): fixed blocks over all layers, one table for each sequence.

Section 4.1: a block holds the keys and values of a fixed number of tokens, in all layers. The paper knows no
windows and no states: here layers with windows keep all tokens, as the first engines did, and what is of fixed size
for a sequence is given whole blocks of its own. There is no null block. Below, the paper's baselines: contiguous
memory for each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from kvplan.core.deployment import Deployment
from kvplan.core.engine_rules import CommonRules
from kvplan.core.kept_layers import as_group
from kvplan.core.kv_cache import (
    KV_DTYPE_BYTES,
    STATES,
    Cache,
    CacheFormat,
    CompressorState,
    CrossAttention,
    LayerCache,
)
from kvplan.core.kv_pool import CommonPool, Formulas, GroupSize
from kvplan.core.model import ModelSpec
from kvplan.core.weights import Stage
from kvplan.errors import unknown_name

#: The vLLM whose overhead is taken for that of the paper's engine: the oldest for which it is known.
OVERHEAD_VERSION = "0.7"


class PagedRules(CommonRules):
    """Defaults of the paper's engine (vLLM 0.1: blocks of 16, a utilization of 0.9, 2,560 tokens, 256 sequences)."""

    name = "paged"
    batch_holds_sequences = True
    missing_settings = CommonRules.missing_settings | {
        "enable_expert_parallel",
        "mamba_ssm_cache_dtype",
        "disable_hybrid_kv_cache_manager",
        "async_scheduling",
    }

    def batch_limits(self, memory_bytes: int | None, gpu_name: str) -> tuple[int, int]:
        """``(max_num_batched_tokens, max_num_seqs)``."""
        return 2560, 256

    def prefix_caching(self, *, has_states: bool, has_attention: bool) -> bool:
        """Shared prefixes are part of the paper (section 4.4)."""
        return not has_states

    def kv_form(
        self,
        asked: str,
        *,
        spec: ModelSpec,
        dtype: str,
        compute_capability: str | None,
    ) -> tuple[str, str]:
        """A plain element type; raises `InputError` for any other."""
        if asked == "auto":
            return dtype, "as dtype"
        if asked not in KV_DTYPE_BYTES:
            raise unknown_name("KV-cache dtype", asked, [*KV_DTYPE_BYTES, "auto"], where="--kv-cache-dtype")
        return asked, ""

    def default_block_size(
        self, caches: Sequence[Cache], kv_form: str, compute_capability: str | None
    ) -> tuple[int, str]:
        """16, which the paper found best (section 7.2)."""
        return 16, ""


class PagedPool(CommonPool):
    """Blocks of ``block_size`` tokens over all layers."""

    formulas = Formulas(
        budget="ceil(memory x {utilization}) - weights {weights} - rotary tables {extras} - overhead {overhead}",
        block="block size x bytes of a token in all layers",
        blocks="available // bytes per block = {available} // {block}",
        pages_source="Kwon et al. 2023, section 4.1",
        states_source="not in the paper: blocks of their own",
        groups_source="Kwon et al. 2023, section 4.1",
        budget_source="vLLM 0.1",
        overhead_source="that of vLLM 0.7, docs/engines.md",
    )

    def __init__(self, spec: ModelSpec, deployment: Deployment, form: CacheFormat | None = None) -> None:
        super().__init__(deployment, form)
        layers = [*spec.layers, *deployment.drafts]
        fixed = (*STATES, CompressorState, CrossAttention)
        self._rows: list[LayerCache] = [item for item in layers if not isinstance(item.cache, fixed)]
        self._fixed: list[LayerCache] = [item for item in layers if isinstance(item.cache, fixed)]

    def bytes_per_block(self, stage: Stage | None = None) -> int:
        """Bytes of one block in all layers; of models that keep nothing by token, what is fixed for a sequence."""
        rows = sum(
            item.cache.page_bytes(self.block_size, self._form)
            for item in self._rows
            if stage is None or stage.holds(item.layer)
        )
        return rows if self._rows else self._fixed_bytes(stage)

    def _fixed_bytes(self, stage: Stage | None) -> int:
        return sum(
            item.cache.payload_bytes(1, self._form)
            for item in self._fixed
            if stage is None or stage.holds(item.layer)
        )

    def blocks(self, length: int) -> int:
        """Blocks for all tokens, and as many as hold what is fixed."""
        if not self._rows:
            return 1
        return -(-length // self.block_size) + self._fixed_blocks

    @cached_property
    def _fixed_blocks(self) -> int:
        """Blocks that hold what is fixed for a sequence; kept, as searches ask for the blocks of many lengths."""
        return -(-self._fixed_bytes(None) // self.bytes_per_block())

    def groups(self, length: int) -> tuple[GroupSize, ...]:
        """All layers in one group, and what is fixed."""
        blocks = self.blocks(length)
        tokens = -(-length // self.block_size) if self._rows else 0
        return (
            *as_group(self._rows, self._form, self.block_size, tokens),
            *as_group(self._fixed, self._form, self.block_size, blocks - tokens),
        )


class ContiguousRules(PagedRules):
    """Defaults of the paper's engine where it has any: the baselines ran on the same machine."""

    def __init__(self, name: str) -> None:
        self.name = name

    def fitted_batch(self, batch: int, seqs: int, max_model_len: int, *, chunked_prefill: bool) -> int:
        """Room for the longest prompt: none is split."""
        return max(batch, max_model_len)

    def prefix_caching(self, *, has_states: bool, has_attention: bool) -> bool:
        """Nothing is shared."""
        return False


class ContiguousPool(PagedPool):
    """Slots, of which each sequence gets one piece: what it reserves (section 6.1).

    That is the longest sequence served (``static``, ``orca-max``), or the piece of a buddy allocator that holds the
    sequence (``orca-oracle``; ``orca-pow2`` reserves at least that, as its output is rounded up first). Memory is
    counted in blocks, so that a number of them is the same memory as in the other engines.
    """

    formulas = PagedPool.formulas._replace(
        pages_source="Kwon et al. 2023, section 6.1",
        states_source="not in the paper: slots of their own",
        groups_source="Kwon et al. 2023, section 6.1",
    )

    def __init__(self, spec: ModelSpec, deployment: Deployment, form: CacheFormat | None = None) -> None:
        super().__init__(spec, deployment, form)
        self._longest = deployment.max_model_len if deployment.engine in ("static", "orca-max") else 0
        self._in_pieces = deployment.engine != "static"

    def blocks(self, length: int) -> int:
        """Blocks of the reservation."""
        slots = super().blocks(max(length, self._longest)) * self.block_size
        if self._in_pieces:
            slots = 1 << (slots - 1).bit_length()
        return -(-slots // self.block_size)
