"""Bytes, blocks and what fits, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from toy_models import toy_spec

from kvplan.config import load_model
from kvplan.core.deployment import Deployment, Margin, pipeline_stages, stages_of
from kvplan.core.kv_cache import (
    Cache,
    CacheFormat,
    FullAttention,
    GatedDeltaNet,
    LatentAttention,
    LayerCache,
    SlidingWindow,
    SparseIndexer,
    kv_heads_per_rank,
)
from kvplan.core.kv_pool import VllmPool
from kvplan.core.model import ModelSpec
from kvplan.core.overhead import Overhead
from kvplan.core.sizing import (
    Budget,
    Capacity,
    GpuBudget,
    KvSizes,
    Plan,
    check_tensor_parallel,
    plan_capacity,
    weight_sizes,
)
from kvplan.core.weights import Weights
from kvplan.errors import InputError

GIB = 1 << 30


def deployment(
    *, kv_cache_dtype: str = "float16", tensor_parallel_size: int = 1, **changes: Any
) -> Deployment:
    """One sequence of 4096 tokens, which is also the longest, in 16 bits."""
    contexts = changes.pop("decode_context_parallel_size", 1)
    cache = CacheFormat("float16", kv_cache_dtype, tensor_parallel_size, contexts)
    return Deployment(**({"seq": 4096, "max_model_len": 4096, "cache": cache, "version": "0.33"} | changes))


def toy(
    *caches: Cache, heads: int = 8, parameters: int | None = 1000, longest: int | None = 4096
) -> ModelSpec:
    """2 layers; with 4 KV heads of 8 elements a token has 2 x 4 x 16 x 2 = 256 bytes in 16 bits."""
    caches = caches or (FullAttention(4, 8),) * 2
    return toy_spec(
        *caches,
        family="llama",
        num_heads=heads,
        max_position_embeddings=longest,
        dtype="float16",
        weights=Weights(parameters, "config"),
    )


def plan_of(spec: ModelSpec, deployed: Deployment) -> Plan:
    return Plan(spec, deployed, VllmPool)


def sizes_of(spec: ModelSpec, deployed: Deployment, stage: int = 0) -> KvSizes:
    plan = plan_of(spec, deployed)
    return plan.kv_sizes(plan.stages[stage])


def overhead_of(low: int, mid: int, high: int) -> Overhead:
    return Overhead(activations=mid, cuda_graphs=0, runtime=0, low=low, high=high)


def capacity_of(
    spec: ModelSpec, deployed: Deployment, memory: int | None = None, *overheads: Overhead
) -> Capacity:
    gpu = None if memory is None else GpuBudget("a gpu", 1, memory, "a test")
    return plan_capacity(plan_of(spec, deployed), Budget(gpu, overheads))


# Bytes


def test_llama_2_13b_has_819200_bytes_a_token() -> None:
    # 40 layers x 40 heads x (128 + 128) x 2 bytes; x 16 a block; x 4096 a sequence.
    sizes = sizes_of(load_model("llama-2-13b"), deployment())
    assert sizes.bytes_per_token == 819_200
    assert sizes.bytes_per_block == 13_107_200
    assert sizes.bytes_per_sequence == sizes.total_bytes == 3_355_443_200
    assert sizes.allocated_bytes_per_sequence == 3_355_443_200  # 256 whole blocks
    assert sizes.fixed_bytes_per_sequence == 0


def test_a_sequence_that_ends_in_mid_block_is_allocated_the_whole_block() -> None:
    # 1000 tokens are 62.5 blocks of 16: 63 x 13,107,200.
    sizes = sizes_of(load_model("llama-2-13b"), deployment(seq=1000))
    assert sizes.bytes_per_sequence == 819_200_000
    assert sizes.allocated_bytes_per_sequence == 825_753_600
    assert sizes.groups[0].blocks_per_sequence == 63


def test_ten_sequences_have_ten_times_the_bytes() -> None:
    sizes = sizes_of(load_model("llama-2-13b"), deployment(concurrency=10))
    assert (sizes.bytes_per_sequence, sizes.total_bytes) == (3_355_443_200, 33_554_432_000)


def test_llama_3_1_8b_has_131072_bytes_a_token_and_8030261248_parameters() -> None:
    # 32 layers x 8 KV heads x (128 + 128) x 2 bytes.
    spec, deployed = load_model("llama-3.1-8b"), deployment()
    assert sizes_of(spec, deployed).bytes_per_token == 131_072
    weights = weight_sizes(spec, deployed, plan_of(spec, deployed).stages)
    assert (weights.parameters, weights.total_bytes) == (8_030_261_248, 16_060_522_496)
    assert weights.per_gpu_bytes == weights.total_bytes


@pytest.mark.parametrize(("dtype", "bytes_per_token"), [("fp8", 128), ("bfloat16", 256), ("float32", 512)])
def test_the_cache_dtype_scales_the_bytes(dtype: str, bytes_per_token: int) -> None:
    sizes = sizes_of(toy(), deployment(kv_cache_dtype=dtype))
    assert (sizes.bytes_per_token, sizes.dtype) == (bytes_per_token, dtype)


def test_a_page_is_one_block_of_one_layer() -> None:
    # 256 bytes x 16 tokens / 2 layers.
    (group,) = sizes_of(toy(), deployment()).groups
    assert (group.kind, group.layers, group.padded_layers, group.page_bytes) == ("full", 2, 2, 2048)


def test_windows_and_states_are_fixed_and_the_rest_grows() -> None:
    # Full: 4 x 16 x 2 = 128 a token. Window: 100 tokens of 128. State: convolution (2 x 2 x 8 + 4 x 8) x 3 x 2 = 384,
    # recurrent 4 x 8 x 8 x 2 = 512.
    state = GatedDeltaNet(2, 8, 4, 8, 4)
    spec = toy(FullAttention(4, 8), SlidingWindow(4, 8, 100), state)
    sizes = sizes_of(spec, deployment(seq=1000))
    assert sizes.bytes_per_token == 128
    assert sizes.fixed_bytes_per_sequence == 100 * 128 + 384 + 512
    assert sizes.bytes_per_sequence == 1000 * 128 + 100 * 128 + 896
    assert sizes_of(spec, deployment(seq=40)).bytes_per_sequence == 40 * 256 + 896


def test_layers_of_two_widths_are_one_group_without_a_page_of_its_own() -> None:
    # A latent of 576 x 2 bytes and an indexer's 132, 16 tokens each.
    sizes = sizes_of(toy(LatentAttention(512, 64), SparseIndexer(128)), deployment())
    (group,) = sizes.groups
    assert (group.kind, group.page_bytes) == ("mla+indexer", None)
    assert sizes.bytes_per_block == 16 * (1152 + 132)


# Tensor and context parallelism


def test_heads_that_divide_among_the_ranks_leave_the_clusters_bytes_as_they_are() -> None:
    sizes = sizes_of(load_model("llama-3.1-8b"), deployment(tensor_parallel_size=8))
    # One of 8 heads on each rank.
    assert sizes.per_gpu.bytes_per_token == 131_072 // 8
    assert sizes.cluster_bytes_per_token == sizes.bytes_per_token == 131_072


def test_more_ranks_than_heads_repeat_the_heads() -> None:
    spec, deployed = load_model("llama-3.1-8b"), deployment(tensor_parallel_size=16, concurrency=3)
    sizes = sizes_of(spec, deployed)
    # 8 KV heads on 16 ranks: one each, every head twice. 32 layers x 1 x 256 x 2 bytes.
    assert sizes.per_gpu.bytes_per_token == 16_384
    assert sizes.cluster_bytes_per_token == 2 * 131_072
    assert sizes.per_gpu.bytes_per_block == 16_384 * 16
    assert sizes.per_gpu.total_bytes == 16_384 * 4096 * 3
    assert sizes.bytes_per_token == 131_072  # the model's own
    plan = plan_of(spec, deployed)
    assert plan.replicated_bytes_per_token(plan.stages[0]) == 8_192  # half of it stands on another rank too


def test_latents_stand_on_every_rank() -> None:
    plan = plan_of(toy(LatentAttention(512, 64), heads=8), deployment(tensor_parallel_size=8))
    sizes = plan.kv_sizes(plan.stages[0])
    assert sizes.per_gpu.bytes_per_token == sizes.bytes_per_token == 1152
    assert sizes.cluster_bytes_per_token == 8 * 1152
    assert plan.replicated_bytes_per_token(plan.stages[0]) == 1152 - 1152 // 8


def test_context_parallel_ranks_share_out_the_tokens() -> None:
    # 1000 tokens on 2 ranks: 500 each, 31.25 blocks of 16.
    deployed = deployment(
        tensor_parallel_size=2, decode_context_parallel_size=2, seq=1000, max_model_len=1000
    )
    sizes = sizes_of(toy(LatentAttention(512, 64)), deployed)
    assert sizes.per_gpu.bytes_per_token == 576
    assert sizes.per_gpu.groups[0].blocks_per_sequence == 32
    assert sizes.bytes_per_token == sizes.cluster_bytes_per_token == 1152


@pytest.mark.parametrize(("heads", "tp"), [(32, 3), (32, 64), (40, 16)])
def test_attention_heads_that_do_not_divide_are_refused(heads: int, tp: int) -> None:
    with pytest.raises(InputError, match=f"{heads} attention heads cannot be divided among {tp}") as error:
        check_tensor_parallel(toy(heads=heads), tp)
    assert error.value.where == "--tensor-parallel-size"


def test_kv_heads_that_neither_divide_nor_are_divided_are_refused() -> None:
    # 12 heads divide among 6 ranks, 4 KV heads neither divide 6 nor are divided by it.
    check_tensor_parallel(toy(heads=12), 6)
    with pytest.raises(InputError, match="4 KV heads and tensor parallel size 6: neither divides"):
        plan_of(toy(heads=12), deployment(tensor_parallel_size=6))


@pytest.mark.parametrize(
    ("heads", "tp", "per_rank"), [(8, 1, 8), (8, 4, 2), (8, 8, 1), (8, 32, 1), (1, 7, 1)]
)
def test_a_rank_holds_its_share_of_the_heads_and_at_least_one(heads: int, tp: int, per_rank: int) -> None:
    assert kv_heads_per_rank(heads, tp) == per_rank


# Pipelines


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [
        (27, 2, [14, 13]),
        (61, 4, [15, 15, 16, 15]),
        (62, 4, [15, 16, 16, 15]),
        (63, 4, [16, 16, 16, 15]),
        (8, 8, [1] * 8),
    ],
)
def test_layers_left_over_go_to_the_stages_before_the_last(
    layers: int, stages: int, sizes: list[int]
) -> None:
    found = pipeline_stages(layers, stages)
    assert [stage.end - stage.first for stage in found] == sizes
    assert [stage.is_first for stage in found] == [True] + [False] * (stages - 1)
    assert [stage.is_last for stage in found] == [False] * (stages - 1) + [True]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(InputError, match="2 layers cannot be shared out among 3 stages") as error:
        pipeline_stages(2, 3)
    assert error.value.hint == "use at most 2"


def test_the_last_stage_has_the_drafts_layers() -> None:
    first, last = stages_of([3, 2])
    assert [first.holds(i) for i in (0, 2, 3, 5)] == [True, True, False, False]
    assert [last.holds(i) for i in (2, 3, 4, 5)] == [False, True, True, True]


def test_the_stage_with_the_most_layers_limits_and_all_have_its_blocks() -> None:
    # 5 layers of 1024 bytes a block: 2 + 3? No: 3 on the first, since what is left over goes before the last.
    spec = toy(*(FullAttention(4, 4),) * 5)
    found = capacity_of(spec, deployment(pipeline_parallel_size=2, kv_cache_memory_bytes=3_072_000))
    assert [rank.layers for rank in found.ranks] == [3, 2]
    assert [rank.bytes_per_block for rank in found.ranks] == [3072, 2048]
    assert [rank.num_blocks for rank in found.ranks] == [1000, 1500]
    assert (found.limiting_rank, found.num_gpu_blocks) == (0, 1000)
    assert found.max_model_len_that_fits == 4096


def test_the_draft_on_the_last_stage_can_make_it_the_limiting_one() -> None:
    spec = toy(*(FullAttention(4, 4),) * 4)
    drafts = tuple(LayerCache(4 + i, FullAttention(4, 4)) for i in range(2))
    found = capacity_of(
        spec, deployment(pipeline_parallel_size=2, drafts=drafts, kv_cache_memory_bytes=4_096_000)
    )
    assert [rank.bytes_per_block for rank in found.ranks] == [2048, 4096]
    assert (found.limiting_rank, found.num_gpu_blocks) == (1, 1000)


def test_a_stage_without_any_cache_is_refused() -> None:
    spec = replace(toy(FullAttention(4, 8), FullAttention(4, 8)), num_layers=4)
    with pytest.raises(InputError, match="a stage of the pipeline has no layer with a cache"):
        capacity_of(spec, deployment(pipeline_parallel_size=2, kv_cache_memory_bytes=GIB))


# Given pools


def test_a_given_number_of_blocks_is_taken_as_it_is() -> None:
    found = capacity_of(toy(), deployment(num_gpu_blocks_override=300))
    # 300 blocks of 16 x 256 bytes; one is the null block; a sequence takes 256 of 299.
    assert (found.num_gpu_blocks, found.usable_blocks) == (300, 299)
    assert found.available_kv_bytes == 300 * 4096
    assert found.taken_kv_bytes == 256 * 4096
    assert found.concurrent_sequences == 1
    assert (found.headroom_bytes, found.headroom_share) == (43 * 4096, 43 / 299)
    assert found.fits_confidence == "exact"
    assert (found.overhead_bytes, found.unused_bytes) == (None, None)
    assert found.exact == (
        "kv",
        "weights",
        "available_kv_bytes",
        "num_gpu_blocks",
        "kv_cache_tokens",
        "max_concurrency",
    )
    assert found.estimated == ()


def test_given_bytes_are_divided_into_whole_blocks() -> None:
    # 257 blocks of 13,107,200 bytes hold 256 and the null block; one byte less is a block less.
    spec = load_model("llama-2-13b")
    exactly = capacity_of(spec, deployment(kv_cache_memory_bytes=257 * 13_107_200))
    assert (exactly.num_gpu_blocks, exactly.fits, exactly.headroom_bytes) == (257, True, 0)
    assert exactly.next_block_bytes == 13_107_200
    short = capacity_of(spec, deployment(kv_cache_memory_bytes=257 * 13_107_200 - 1))
    assert (short.num_gpu_blocks, short.fits, short.headroom_bytes) == (256, False, -13_107_200)
    assert short.reason == "a sequence of max_model_len 4,096 needs 256 blocks, 255 are usable"
    assert short.next_block_bytes == 1


def test_an_override_wins_over_given_bytes() -> None:
    found = capacity_of(toy(), deployment(num_gpu_blocks_override=300, kv_cache_memory_bytes=10**12))
    assert found.num_gpu_blocks == 300


@pytest.mark.parametrize(("blocks", "fits"), [(3, False), (768, False), (769, True)])
def test_so_many_sequences_fit_exactly_or_lack_one_block(blocks: int, fits: bool) -> None:
    # 3 sequences of 4096 tokens take 768 blocks, and the null block.
    found = capacity_of(toy(), deployment(concurrency=3, num_gpu_blocks_override=blocks))
    assert found.fits is fits
    assert found.concurrent_sequences == (blocks - 1) // 256


def test_the_verdict_says_what_is_needed_and_what_is_there() -> None:
    yes = capacity_of(toy(), deployment(concurrency=3, num_gpu_blocks_override=769))
    assert yes.reason == "3 sequences of 4,096 tokens need 768 of 768 usable blocks"
    no = capacity_of(toy(), deployment(concurrency=3, num_gpu_blocks_override=768))
    assert no.reason == "3 sequences of 4,096 tokens need 768 blocks, 767 are usable"


@pytest.mark.parametrize(("version", "blocks"), [("0.33", 257), ("0.26", 256), ("0.19", 256)])
def test_the_null_block_counts_in_the_check_at_the_start_since_0_33(version: str, blocks: int) -> None:
    # Short sequences: only the check of max_model_len, 256 blocks, decides.
    deployed = deployment(seq=16, version=version)
    assert capacity_of(toy(), deployed._replace(num_gpu_blocks_override=blocks)).fits
    refused = capacity_of(toy(), deployed._replace(num_gpu_blocks_override=blocks - 1))
    assert not refused.fits
    assert refused.reason.startswith("a sequence of max_model_len 4,096 needs 256 blocks")
    assert refused.max_model_len_that_fits == 4080


def test_a_pool_of_the_null_block_alone_holds_nothing() -> None:
    found = capacity_of(toy(), deployment(num_gpu_blocks_override=1))
    assert (found.usable_blocks, found.concurrent_sequences, found.max_model_len_that_fits) == (0, 0, 0)
    assert (found.fits, found.headroom_share) == (False, None)
    assert found.reason == "there is no room for a block of KV beside the null block"


def test_the_token_line_counts_the_null_block_as_the_engines_does() -> None:
    # 384 blocks / 256 a sequence = 1.5 sequences of 4096 tokens.
    found = capacity_of(toy(), deployment(num_gpu_blocks_override=384))
    assert (found.max_concurrency, found.kv_cache_tokens) == (1.5, 6144)


def test_the_longest_length_that_fits_is_bounded_by_pool_and_model() -> None:
    # 99 usable blocks of 16 are 1584 tokens; 999 are more than the model's 4096.
    assert capacity_of(toy(), deployment(num_gpu_blocks_override=100)).max_model_len_that_fits == 1584
    assert capacity_of(toy(), deployment(num_gpu_blocks_override=1000)).max_model_len_that_fits == 4096
    endless = toy(longest=None)
    assert capacity_of(endless, deployment(num_gpu_blocks_override=1000)).max_model_len_that_fits == 15984


def test_without_a_maximum_the_ranks_of_context_parallelism_together_bound_the_length() -> None:
    # 999 blocks of 16 tokens on each of 2 ranks.
    deployed = deployment(
        tensor_parallel_size=2, decode_context_parallel_size=2, num_gpu_blocks_override=1000
    )
    endless = toy(LatentAttention(512, 64), longest=None)
    assert capacity_of(endless, deployed).max_model_len_that_fits == 2 * 15984


def test_a_full_window_asks_for_no_more_whatever_the_length() -> None:
    # Window 100 and 2 x 2048 tokens in flight: cdiv(99 + 4096, 16) + 1 = 264 blocks, however long the sequence.
    spec = toy(SlidingWindow(4, 8, 100), longest=1_000_000)
    assert capacity_of(spec, deployment(num_gpu_blocks_override=265)).max_model_len_that_fits == 1_000_000
    # 262 usable blocks: a block of its own for the window's start, 261 x 16 tokens.
    assert capacity_of(spec, deployment(num_gpu_blocks_override=263)).max_model_len_that_fits == 4176


# Memory budgets


def test_memory_times_utilization_less_weights_and_overhead_is_for_the_cache() -> None:
    # ceil(24 GiB x 0.92) = 23,708,219,474; weights 2 x 6,738,415,616; the cosine and sine of 128 elements for 4096
    # positions in 2 bytes = 1,048,576; overhead 1 GiB. 1076 blocks of 524,288 x 16 bytes.
    spec = load_model("llama-2-7b")
    found = capacity_of(spec, deployment(), 24 * GIB, overhead_of(GIB, GIB, GIB))
    rank = found.ranks[0]
    assert (rank.weights_bytes, rank.overhead_bytes) == (13_476_831_232, GIB)
    assert found.available_kv_bytes == 23_708_219_474 - 13_476_831_232 - rank.extra_bytes - GIB
    assert found.num_gpu_blocks == found.available_kv_bytes // 8_388_608
    assert found.next_block_bytes == (found.num_gpu_blocks + 1) * 8_388_608 - found.available_kv_bytes
    assert found.unused_bytes == 24 * GIB - 23_708_219_474
    assert (found.fits, found.fits_confidence) == (True, "likely")
    assert found.weights_share_of_memory == 13_476_831_232 / (24 * GIB)
    assert found.sequences_share_of_memory == 4096 * 524_288 / (24 * GIB)
    assert (found.exact, found.estimated[0]) == (("kv", "weights"), "overhead_bytes")


@pytest.mark.parametrize(("margin", "fits"), [("low", True), ("mid", False), ("high", False)])
def test_a_verdict_that_depends_on_the_margin_is_uncertain(margin: Margin, fits: bool) -> None:
    # 300 blocks of 4096 bytes less the overhead's 0, 50 and 100: 299, 249 and 199 usable; a sequence takes 256.
    memory = 300 * 4096 + 2000
    parts = overhead_of(0, 50 * 4096, 100 * 4096)
    found = capacity_of(toy(), deployment(margin=margin, gpu_memory_utilization=1.0), memory, parts)
    assert (found.fits, found.fits_confidence) == (fits, "uncertain")
    assert found.num_gpu_blocks == {"low": 300, "mid": 250, "high": 200}[margin]


@pytest.mark.parametrize(("blocks", "fits"), [(500, True), (300, False)])
def test_a_verdict_that_holds_over_the_whole_range_is_likely(blocks: int, fits: bool) -> None:
    memory = blocks * 4096 + 2000
    parts = overhead_of(100 * 4096, 150 * 4096, 200 * 4096)
    found = capacity_of(toy(), deployment(gpu_memory_utilization=1.0), memory, parts)
    assert (found.fits, found.fits_confidence) == (fits, "likely")


def test_each_stage_has_its_own_overhead_and_weights() -> None:
    # 16 layers of 4096 x 16 bytes a token in each of two equal stages; the second has the larger overhead.
    spec = load_model("llama-2-7b")
    deployed = deployment(pipeline_parallel_size=2, gpu_memory_utilization=1.0)
    small, large = overhead_of(0, 0, 0), overhead_of(GIB, GIB, GIB)
    found = capacity_of(spec, deployed, 12 * GIB, small, large)
    assert [rank.overhead_bytes for rank in found.ranks] == [0, GIB]
    for rank in found.ranks:
        assert rank.weights_bytes is not None
        # An embedding on the first stage, a norm and a head as large on the last, 16 layers on each.
        assert rank.weights_bytes == 32_000 * 4096 * 2 + 16 * 404_766_720 + 8192 * (rank.stage == 1)
        left = 12 * GIB - rank.weights_bytes - rank.extra_bytes - (GIB if rank.stage else 0)
        assert rank.num_blocks == left // (16 * 16_384 * 16)
    assert (found.limiting_rank, found.overhead_bytes) == (1, large)


def test_a_total_alone_does_not_say_what_a_stage_holds() -> None:
    deployed = deployment(pipeline_parallel_size=2)
    with pytest.raises(InputError, match="not known: only their total is known, not what each stage holds"):
        capacity_of(toy(), deployed, GIB, *[overhead_of(0, 0, 0)] * 2)


def test_a_gpu_that_is_too_small_for_the_weights_has_no_blocks() -> None:
    found = capacity_of(load_model("llama-2-7b"), deployment(), 8 * GIB, overhead_of(0, 0, 0))
    assert (found.num_gpu_blocks, found.usable_blocks, found.fits) == (0, 0, False)
    assert found.available_kv_bytes < 0
    assert found.reason == (
        "weights and overhead need 5.19 GiB more on a GPU than it gives the engine; nothing is left for KV"
    )
    assert found.fits_confidence == "likely"


def test_more_sequences_than_the_scheduler_runs_are_never_resident_at_once() -> None:
    found = capacity_of(toy(), deployment(seq=16, concurrency=257, num_gpu_blocks_override=1000))
    assert not found.fits
    assert found.reason == "257 sequences are never resident at once: max_num_seqs is 256"


def test_a_given_pool_bypasses_the_budget_but_not_the_memory() -> None:
    fitting, huge = (
        capacity_of(load_model("llama-2-7b"), deployment(kv_cache_memory_bytes=size * GIB), 24 * GIB)
        for size in (8, 16)
    )
    assert (fitting.fits, huge.fits) == (True, False)
    # 13,476,831,232 of weights and 2048 blocks of 8 MiB.
    assert (
        huge.reason
        == f"weights and KV need {13_476_831_232 / GIB + 16:.2f} GiB on each GPU, which has 24.00 GiB"
    )


def test_unknown_weights_are_refused_with_a_gpu_and_do_not_matter_with_given_bytes() -> None:
    spec = toy(parameters=None)
    with pytest.raises(InputError, match="the size of the weights is not known"):
        capacity_of(spec, deployment(), 8 * GIB, overhead_of(0, 0, 0))
    found = capacity_of(spec, deployment(kv_cache_memory_bytes=GIB))
    assert found.fits
    assert (found.weights_share_of_memory, found.ranks[0].replicated_weights_bytes) == (None, None)
    stages = plan_of(spec, deployment()).stages
    assert weight_sizes(spec, deployment(), stages).per_gpu_bytes is None


def test_a_model_without_any_cache_has_the_one_block_that_the_engine_makes() -> None:
    spec = replace(toy(), layers=())
    found = capacity_of(spec, deployment(kv_cache_memory_bytes=GIB))
    assert (found.num_gpu_blocks, found.kv_cache_tokens, found.next_block_bytes) == (1, 0, 0)
    assert found.concurrent_sequences == 0
