"""The arithmetic of a plan with its own numbers, a line each, with the source of each rule in brackets.

Sources are files of the engine named in the first line, unless they say otherwise.
"""

from __future__ import annotations

from kvplan.core.kv_cache import (
    KV_DTYPE_BYTES,
    STATES,
    Cache,
    CacheFormat,
    FullAttention,
    SlidingWindow,
    describe,
)
from kvplan.core.kv_pool import Formulas
from kvplan.core.sizing import Capacity, KvSizes, Plan, WeightSizes


def explain(plan: Plan, kv: KvSizes, weights: WeightSizes, capacity: Capacity | None) -> list[str]:
    """Each formula with this model's numbers; the last line is the verdict or, without a budget, the total."""
    deployment = plan.deployment
    lines = [f"by the rules of {deployment.engine} {deployment.version}".rstrip()]
    whole, formulas = plan.whole_form, plan.pool.formulas
    lines += [_cache_line(cache, count, whole, formulas) for cache, count in plan.spec.attention]
    if deployment.drafts:
        lines.append(f"the draft adds {len(deployment.drafts)} caches of its own")
    lines.append(
        f"fixed per sequence (full windows and states) = {kv.fixed_bytes_per_sequence:,}; "
        f"growth per token = {kv.bytes_per_token:,}"
    )
    lines += _group_lines(plan, kv)
    lines.append(
        f"payload of a sequence of {deployment.seq:,} tokens = {kv.bytes_per_sequence:,}; in whole blocks "
        f"{kv.allocated_bytes_per_sequence:,}"
    )
    if deployment.gpus > 1:
        lines.append(
            f"per GPU: {kv.per_gpu.bytes_per_token:,} bytes per token, {kv.per_gpu.bytes_per_block:,} per block; "
            f"over all ranks of a replica {kv.cluster_bytes_per_token:,} per token"
        )
    if (
        weights.total_bytes is not None
        and weights.parameters is not None
        and weights.per_gpu_bytes is not None
    ):
        lines.append(
            f"weights = {weights.parameters:,} parameters = {weights.total_bytes:,} bytes ({weights.source}), "
            f"{weights.per_gpu_bytes:,} per GPU"
        )
    lines.append(
        f"total = payload of a sequence x concurrency = {kv.bytes_per_sequence:,} x {deployment.concurrency:,} = "
        f"{kv.total_bytes:,}"
    )
    if capacity is not None:
        lines += _capacity_lines(plan, capacity)
    return lines


def _cache_line(cache: Cache, count: int, form: CacheFormat, formulas: Formulas) -> str:
    fields = ", ".join(f"{name} {value}" for name, value in describe(cache).items() if name != "kind")
    if isinstance(cache, STATES):
        size = cache.page_bytes(1, form)
        return f"{count} x {cache.kind} ({fields}): {size:,} bytes of state in each layer [{formulas.states_source}]"
    if isinstance(cache, (FullAttention, SlidingWindow)) and form.kv_cache_dtype in KV_DTYPE_BYTES:
        element = KV_DTYPE_BYTES[form.kv_cache_dtype]
        size = cache.page_bytes(1, form)
        return (
            f"{count} x {cache.kind} ({fields}): KV heads x (key + value size) x element bytes = "
            f"{cache.num_kv_heads} x ({cache.head_dim} + {cache.value_size}) x {element} = {size:,} bytes per token "
            f"in each layer [{formulas.pages_source}]"
        )
    one = cache.payload_bytes(128, form)
    per_token = f"{one // 128:,}" if one % 128 == 0 else f"{one / 128:,.2f}"
    return f"{count} x {cache.kind} ({fields}): {per_token} bytes per token in each layer [{formulas.pages_source}]"


def _group_lines(plan: Plan, kv: KvSizes) -> list[str]:
    lines = []
    for group in kv.groups:
        page = (
            "pages of several sizes" if group.page_bytes is None else f"pages of {group.page_bytes:,} bytes"
        )
        padding, blocks = group.padded_layers - group.layers, group.blocks_per_sequence
        lines.append(
            f"group of {group.layers} {group.kind} layers{f' and {padding} of padding' if padding else ''}: "
            f"{page} for {group.block_size:,} tokens, {blocks:,} block{'' if blocks == 1 else 's'} for the sequence"
        )
    formulas = plan.pool.formulas
    lines.append(
        f"bytes per block = {formulas.block} = {kv.bytes_per_block:,}; blocks of the sequence in all groups = "
        f"{plan.pool.blocks(plan.deployment.seq):,} [{formulas.groups_source}]"
    )
    return lines


def _capacity_lines(plan: Plan, capacity: Capacity) -> list[str]:
    lines = []
    deployment = plan.deployment
    rank = capacity.ranks[capacity.limiting_rank]
    overhead, formulas = capacity.overhead_bytes, plan.pool.formulas
    if overhead is not None:
        measured = capacity.overhead_source != "estimated"
        source = "a start of the engine, docs/audit.md" if measured else formulas.overhead_source
        lines.append(
            f"overhead ({deployment.margin}, {capacity.overhead_source}) = activations {overhead.activations:,} + "
            f"CUDA graphs {overhead.cuda_graphs:,} + runtime {overhead.runtime:,}; from {overhead.low:,} to "
            f"{overhead.high:,} [{source}]"
        )
        budget = formulas.budget.format(
            utilization=deployment.gpu_memory_utilization,
            weights=f"{rank.weights_bytes:,}",
            extras=f"{rank.extra_bytes:,}",
            overhead=f"{overhead.total(deployment.margin):,}",
        )
        lines.append(
            f"available for KV = {budget} = {capacity.available_kv_bytes:,} [{formulas.budget_source}]"
        )
    null = ", one of them the null block" if plan.pool.null_blocks else ""
    blocks = formulas.blocks.format(
        available=f"{capacity.available_kv_bytes:,}",
        block=f"{rank.bytes_per_block:,}",
        tokens=plan.pool.block_size,
    )
    lines.append(f"blocks = {blocks} = {rank.num_blocks:,}{null} [{formulas.groups_source}]")
    if len(capacity.ranks) > 1:
        lines.append(
            f"stage {capacity.limiting_rank} of {len(capacity.ranks)} has the fewest: all have "
            f"{capacity.num_gpu_blocks:,}"
        )
    lines.append(
        f"the engine prints {capacity.kv_cache_tokens:,} tokens and {capacity.max_concurrency:.2f}x for "
        f"{capacity.max_model_len:,} tokens"
    )
    lines += _resident_lines(capacity)
    lines.append(f"fits: {'yes' if capacity.fits else 'no'}: {capacity.reason}")
    return lines


def _resident_lines(capacity: Capacity) -> list[str]:
    found = capacity.distribution
    if found is None:
        return []
    free = capacity.usable_blocks
    take = f"{found.method}: a sequence takes {found.blocks_mean:,.2f} blocks on average"
    spread = f", standard deviation {found.blocks_stddev:,.2f}" if found.blocks_stddev else ""
    shared = f"; {found.shared_blocks:,.2f} of them are shared" if found.shared_blocks else ""
    lines = [f"{take}{spread}{shared}"]
    if found.method == "trace":
        lines.append(
            f"counted from each sequence of the trace on until {free:,} blocks are full: "
            f"{found.concurrent_mean:,} on average, {found.concurrent_p95:,} or more in 95 % of the counts"
        )
        return lines
    own = found.blocks_mean - found.shared_blocks
    once = found.shared_blocks if found.method != "trace, extended" else 0
    rest = f"{free:,} - {once:,.0f}" if once else f"{free:,}"
    lines.append(f"resident at once on average = ({rest}) // {own:,.2f} = {found.concurrent_mean:,}")
    if found.blocks_stddev:
        lines.append(
            f"with 95 % confidence = the most n with n x {own:,.2f} + 1.645 x sqrt(n) x "
            f"{found.blocks_stddev:,.2f} <= {rest}: {found.concurrent_p95:,}"
        )
    return lines
