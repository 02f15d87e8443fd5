"""Bytes, blocks and what fits, by hand."""

from __future__ import annotations

import pytest

from kvplan.config import load_model
from kvplan.core.model import FullAttention, ModelSpec, OtherAttention, Weights, kv_heads_per_rank
from kvplan.core.sizing import (
    Capacity,
    Deployment,
    GpuBudget,
    Margin,
    blocks_for,
    check_tensor_parallel,
    default_batch_limits,
    estimate_overhead,
    explain,
    kv_sizes,
    plan_capacity,
    weight_sizes,
)
from kvplan.errors import InputError

GIB = 1 << 30


def deployment(**changes: object) -> Deployment:
    """One sequence of 4096 tokens, which is also the longest, in 16 bits."""
    settings: dict[str, object] = {
        "seq": 4096,
        "max_model_len": 4096,
        "dtype": "float16",
        "kv_cache_dtype": "float16",
    }
    return Deployment(**(settings | changes))  # type: ignore[arg-type]


def capacity(spec: ModelSpec, deployed: Deployment, gpu: GpuBudget | None = None) -> Capacity:
    return plan_capacity(
        spec,
        deployed,
        kv_sizes(spec, deployed),
        weight_sizes(spec, deployed),
        gpu=gpu,
        max_num_batched_tokens=2048,
    )


def toy(*, heads: int = 8, kv_heads: int = 4, parameters: int | None = 1000, **changes: object) -> ModelSpec:
    """2 layers; with 4 KV heads of 8 elements a token has 2 x 4 x 16 x 2 = 256 bytes in 16 bits."""
    fields: dict[str, object] = {
        "name": "toy",
        "family": "llama",
        "architecture": "LlamaForCausalLM",
        "num_layers": 2,
        "hidden_size": 64,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": 8,
        "vocab_size": 100,
        "max_position_embeddings": 4096,
        "rope_scaled": False,
        "dtype": "float16",
        "attention": (FullAttention(layers=2, num_kv_heads=kv_heads, head_dim=8),),
        "weights": Weights(parameters, "config"),
        "source": "a test",
    }
    return ModelSpec(**(fields | changes))  # type: ignore[arg-type]


# Bytes


def test_llama_2_13b_has_819200_bytes_a_token() -> None:
    # 40 layers x 40 heads x (128 + 128) x 2 bytes; x 16 a block; x 4096 a sequence.
    sizes = kv_sizes(load_model("llama-2-13b"), deployment())
    assert sizes.bytes_per_token == 819_200
    assert sizes.bytes_per_block == 13_107_200
    assert sizes.bytes_per_sequence == sizes.total_bytes == 3_355_443_200
    assert sizes.allocated_bytes_per_sequence == 3_355_443_200  # 256 whole blocks
    assert sizes.fixed_bytes_per_sequence == 0


def test_a_sequence_that_ends_in_mid_block_is_allocated_the_whole_block() -> None:
    # 1000 tokens are 62.5 blocks of 16: 63 x 13,107,200.
    sizes = kv_sizes(load_model("llama-2-13b"), deployment(seq=1000))
    assert sizes.bytes_per_sequence == 819_200_000
    assert sizes.allocated_bytes_per_sequence == 825_753_600
    assert sizes.groups[0].blocks_per_sequence == 63


def test_ten_sequences_have_ten_times_the_bytes() -> None:
    sizes = kv_sizes(load_model("llama-2-13b"), deployment(concurrency=10))
    assert (sizes.bytes_per_sequence, sizes.total_bytes) == (3_355_443_200, 33_554_432_000)


def test_llama_3_1_8b_has_131072_bytes_a_token_and_8030261248_parameters() -> None:
    # 32 layers x 8 KV heads x (128 + 128) x 2 bytes.
    spec, deployed = load_model("llama-3.1-8b"), deployment(dtype="bfloat16", kv_cache_dtype="bfloat16")
    assert kv_sizes(spec, deployed).bytes_per_token == 131_072
    weights = weight_sizes(spec, deployed)
    assert (weights.parameters, weights.total_bytes) == (8_030_261_248, 16_060_522_496)
    assert weights.per_gpu_bytes == weights.total_bytes


@pytest.mark.parametrize(("dtype", "bytes_per_token"), [("fp8", 128), ("bfloat16", 256), ("float32", 512)])
def test_the_cache_dtype_scales_the_bytes(dtype: str, bytes_per_token: int) -> None:
    assert kv_sizes(toy(), deployment(kv_cache_dtype=dtype)).bytes_per_token == bytes_per_token


def test_a_value_may_have_another_size_than_a_key() -> None:
    # 2 layers x 4 heads x (8 + 4) x 2 bytes.
    spec = toy(attention=(FullAttention(layers=2, num_kv_heads=4, head_dim=8, value_head_dim=4),))
    assert kv_sizes(spec, deployment()).bytes_per_token == 192


def test_a_page_is_one_block_of_one_layer() -> None:
    # 256 bytes x 16 tokens / 2 layers.
    (group,) = kv_sizes(toy(), deployment()).groups
    assert (group.kind, group.layers, group.padded_layers, group.page_bytes) == ("full", 2, 2, 2048)


def test_attention_that_cannot_be_sized_is_refused_by_name() -> None:
    spec = toy(attention=(FullAttention(1, 4, 8), OtherAttention("mla", 1)))
    with pytest.raises(InputError, match=r"not yet supported: mla attention \(1 of 2 layers\)"):
        kv_sizes(spec, deployment())


# Tensor parallelism


def test_heads_that_divide_among_the_ranks_leave_the_clusters_bytes_as_they_are() -> None:
    sizes = kv_sizes(load_model("llama-3.1-8b"), deployment(tensor_parallel_size=8))
    # One of 8 heads on each rank.
    assert sizes.per_gpu.bytes_per_token == 131_072 // 8
    assert sizes.cluster_bytes_per_token == sizes.bytes_per_token == 131_072


def test_more_ranks_than_heads_repeat_the_heads() -> None:
    sizes = kv_sizes(load_model("llama-3.1-8b"), deployment(tensor_parallel_size=16, concurrency=3))
    # 8 KV heads on 16 ranks: one each, every head twice. 32 layers x 1 x 256 x 2 bytes.
    assert sizes.per_gpu.bytes_per_token == 16_384
    assert sizes.cluster_bytes_per_token == 2 * 131_072
    assert sizes.per_gpu.bytes_per_block == 16_384 * 16
    assert sizes.per_gpu.total_bytes == 16_384 * 4096 * 3
    assert sizes.bytes_per_token == 131_072  # the model's own


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), [(32, 8, 3), (32, 8, 64), (40, 40, 16)])
def test_attention_heads_that_do_not_divide_are_refused(heads: int, kv_heads: int, tp: int) -> None:
    with pytest.raises(InputError, match=f"{heads} attention heads cannot be divided among {tp}") as error:
        check_tensor_parallel(toy(heads=heads, kv_heads=kv_heads), tp)
    assert error.value.where == "--tensor-parallel-size"


def test_kv_heads_that_neither_divide_nor_are_divided_are_refused() -> None:
    # 12 heads divide among 6 ranks, 4 KV heads neither divide 6 nor are divided by it.
    with pytest.raises(InputError, match="4 KV heads and tensor parallel size 6: neither divides"):
        check_tensor_parallel(toy(heads=12, kv_heads=4), 6)
    check_tensor_parallel(toy(heads=12, kv_heads=4), 12)
    check_tensor_parallel(toy(heads=12, kv_heads=4), 2)


@pytest.mark.parametrize(
    ("heads", "tp", "per_rank"), [(8, 1, 8), (8, 4, 2), (8, 8, 1), (8, 32, 1), (1, 7, 1)]
)
def test_a_rank_holds_its_share_of_the_heads_and_at_least_one(heads: int, tp: int, per_rank: int) -> None:
    assert kv_heads_per_rank(heads, tp) == per_rank


# Budgets


def test_a_given_number_of_blocks_is_taken_as_it_is() -> None:
    found = capacity(toy(), deployment(num_gpu_blocks_override=300))
    # 300 blocks of 16 x 256 bytes; one is the null block; a sequence takes 256 of 299.
    assert (found.num_gpu_blocks, found.usable_blocks) == (300, 299)
    assert found.available_kv_bytes == 300 * 4096
    assert found.concurrent_sequences == 1
    assert (found.headroom_bytes, found.headroom_share) == (43 * 4096, 43 / 299)
    assert found.fits_confidence == "exact"
    assert found.overhead_bytes is None


def test_given_bytes_are_divided_into_whole_blocks() -> None:
    # 257 blocks of 13,107,200 bytes hold 256 and the null block; one byte less is a block less.
    spec = load_model("llama-2-13b")
    exactly = capacity(spec, deployment(kv_cache_memory_bytes=257 * 13_107_200))
    assert (exactly.num_gpu_blocks, exactly.fits, exactly.headroom_bytes) == (257, True, 0)
    short = capacity(spec, deployment(kv_cache_memory_bytes=257 * 13_107_200 - 1))
    assert (short.num_gpu_blocks, short.fits, short.headroom_bytes) == (256, False, -13_107_200)
    assert short.reason == ("a sequence of max_model_len 4,096 needs 256 blocks, 255 are usable")


def test_an_override_wins_over_given_bytes() -> None:
    found = capacity(toy(), deployment(num_gpu_blocks_override=300, kv_cache_memory_bytes=10**12))
    assert found.num_gpu_blocks == 300


@pytest.mark.parametrize(("blocks", "fits"), [(3, False), (768, False), (769, True)])
def test_so_many_sequences_fit_exactly_or_lack_one_block(blocks: int, fits: bool) -> None:
    # 3 sequences of 4096 tokens take 768 blocks, and the null block.
    found = capacity(toy(), deployment(concurrency=3, num_gpu_blocks_override=blocks))
    assert found.fits is fits
    assert found.concurrent_sequences == (blocks - 1) // 256


def test_the_verdict_says_what_is_needed_and_what_is_there() -> None:
    yes = capacity(toy(), deployment(concurrency=3, num_gpu_blocks_override=769))
    assert yes.reason == "3 sequences of 4,096 tokens need 768 of 768 usable blocks"
    no = capacity(toy(), deployment(concurrency=3, num_gpu_blocks_override=768))
    assert no.reason == "3 sequences of 4,096 tokens need 768 blocks, 767 are usable"


def test_short_sequences_do_not_help_an_engine_that_would_not_start() -> None:
    assert not capacity(toy(), deployment(seq=16, num_gpu_blocks_override=256)).fits
    assert capacity(toy(), deployment(seq=16, num_gpu_blocks_override=257)).fits


def test_a_pool_of_the_null_block_alone_holds_nothing() -> None:
    found = capacity(toy(), deployment(num_gpu_blocks_override=1))
    assert (found.usable_blocks, found.concurrent_sequences, found.max_model_len_that_fits) == (0, 0, 0)
    assert (found.fits, found.headroom_share) == (False, None)


def test_the_token_line_counts_the_null_block_as_the_engines_does() -> None:
    # 384 blocks / 256 a sequence = 1.5 sequences of 4096 tokens.
    found = capacity(toy(), deployment(num_gpu_blocks_override=384))
    assert (found.max_concurrency, found.kv_cache_tokens) == (1.5, 6144)


def test_the_longest_length_that_fits_is_bounded_by_pool_and_model() -> None:
    # 99 usable blocks of 16 are 1584 tokens; 999 are more than the model's 4096.
    assert capacity(toy(), deployment(num_gpu_blocks_override=100)).max_model_len_that_fits == 1584
    assert capacity(toy(), deployment(num_gpu_blocks_override=1000)).max_model_len_that_fits == 4096
    endless = toy(max_position_embeddings=None)
    assert capacity(endless, deployment(num_gpu_blocks_override=1000)).max_model_len_that_fits == 15984


def test_overhead_is_estimated_from_batch_layers_and_vocabulary() -> None:
    # Sampler 14.4 x 256 x 32,000 = 117,964,800 < forward 9 x (2048 x 4096 x 2) = 150,994,944; and twice
    # 16,777,216. Graphs 1/4 GiB + 32 x 18 MiB; runtime 1/4 GiB. In all 1,325,400,064; x 0.6 and x 1.5.
    found = estimate_overhead(load_model("llama-2-7b"), deployment(), 2048)
    assert found.activations == 184_549_376
    assert found.cuda_graphs == 872_415_232
    assert found.runtime == 268_435_456
    assert (found.low, found.total("mid"), found.high) == (795_240_038, 1_325_400_064, 1_988_100_096)
    assert (found.total("low"), found.total("high")) == (found.low, found.high)


def test_eager_mode_has_no_graphs_and_several_ranks_a_larger_runtime() -> None:
    found = estimate_overhead(
        load_model("llama-2-7b"), deployment(enforce_eager=True, tensor_parallel_size=2), 2048
    )
    assert (found.cuda_graphs, found.runtime) == (0, 21 * GIB // 10)
    # Forward 150,994,944 / 2 is now below the sampler's 117,964,800.
    assert found.activations == 117_964_800 + 2 * 16_777_216


def test_a_gpus_memory_less_weights_and_overhead_is_for_the_cache() -> None:
    # ceil(24 GiB x 0.92) = 23,708,219,474; weights 2 x 6,738,415,616; overhead 1,325,400,064 (see above);
    # 8,905,988,178 are left: 1061 blocks of 524,288 x 16 bytes.
    spec, gpu = load_model("llama-2-7b"), GpuBudget("a gpu", 1, 24 * GIB, "a test")
    found = capacity(spec, deployment(), gpu)
    assert found.available_kv_bytes == 8_905_988_178
    assert (found.num_gpu_blocks, found.usable_blocks, found.concurrent_sequences) == (1061, 1060, 4)
    assert (found.fits, found.fits_confidence) == (True, "likely")
    assert found.weights_share_of_memory == 13_476_831_232 / (24 * GIB)
    assert found.sequences_share_of_memory == 4096 * 524_288 / (24 * GIB)
    assert found.ranks[0].weights_bytes == 13_476_831_232


@pytest.mark.parametrize(
    ("margin", "blocks", "fits"), [("low", 1124, True), ("mid", 1061, False), ("high", 982, False)]
)
def test_a_verdict_that_depends_on_the_margin_is_uncertain(margin: Margin, blocks: int, fits: bool) -> None:
    # As above with overheads of 795,240,038 and 1,988,100,096: 9,436,148,204 and 8,243,288,146 bytes.
    # 220 sequences of five blocks each fit into the first only.
    gpu = GpuBudget("a gpu", 1, 24 * GIB, "a test")
    found = capacity(load_model("llama-2-7b"), deployment(seq=80, concurrency=220, margin=margin), gpu)
    assert (found.num_gpu_blocks, found.fits, found.fits_confidence) == (blocks, fits, "uncertain")


def test_more_sequences_than_the_scheduler_runs_are_never_resident_at_once() -> None:
    gpu = GpuBudget("a gpu", 1, 24 * GIB, "a test")
    found = capacity(load_model("llama-2-7b"), deployment(seq=16, concurrency=257), gpu)
    assert not found.fits
    assert found.reason == "257 sequences are never resident at once: max_num_seqs is 256"


def test_a_given_pool_bypasses_the_budget_but_not_the_memory() -> None:
    gpu = GpuBudget("a gpu", 1, 24 * GIB, "a test")
    fitting, huge = (
        capacity(load_model("llama-2-7b"), deployment(kv_cache_memory_bytes=size * GIB), gpu)
        for size in (8, 16)
    )
    assert (fitting.fits, huge.fits) == (True, False)
    assert huge.reason.startswith("weights and KV need ")


def test_a_gpu_that_is_too_small_for_the_weights_has_no_blocks() -> None:
    found = capacity(load_model("llama-2-7b"), deployment(), GpuBudget("a gpu", 1, 8 * GIB, "a test"))
    assert (found.num_gpu_blocks, found.usable_blocks, found.fits) == (0, 0, False)
    assert found.available_kv_bytes < 0
    assert found.reason == "there is no room for a block of KV beside the null block"
    assert found.fits_confidence == "likely"


def test_unknown_weights_are_refused_with_a_gpu_and_do_not_matter_with_given_bytes() -> None:
    spec = toy(parameters=None)
    with pytest.raises(InputError, match="the size of the weights is not known"):
        capacity(spec, deployment(), GpuBudget("a gpu", 1, 8 * GIB, "a test"))
    assert capacity(spec, deployment(kv_cache_memory_bytes=GIB)).fits


@pytest.mark.parametrize(
    ("memory", "name", "limits"),
    [
        (None, "", (2048, 256)),
        (24 * GIB, "rtx", (2048, 256)),
        (70 * GIB - 1, "x", (2048, 256)),
        (70 * GIB, "x", (8192, 1024)),
        (80 * GIB, "A100-80GB", (2048, 256)),
        (160 * GIB - 1, "x", (8192, 1024)),
        (160 * GIB, "x", (16384, 1024)),
    ],
)
def test_batch_limits_follow_the_memory(memory: int | None, name: str, limits: tuple[int, int]) -> None:
    assert default_batch_limits(memory, name) == limits


# Explanations


def test_every_formula_is_explained_with_its_numbers() -> None:
    spec, deployed = load_model("llama-2-13b"), deployment(concurrency=10)
    lines = explain(spec, deployed, kv_sizes(spec, deployed), weight_sizes(spec, deployed), None)
    assert lines[0].endswith("= 40 x 40 x (128 + 128) x 2 = 819,200")
    assert lines[1].endswith("= 819,200 x 16 = 13,107,200")
    assert lines[2].endswith("= 819,200 x 4,096 = 3,355,443,200")
    assert lines[-1].endswith("= 3,355,443,200 x 10 = 33,554,432,000")


def test_the_explanation_of_a_budget_ends_with_the_verdict() -> None:
    spec = load_model("llama-3.1-8b")
    deployed = deployment(tensor_parallel_size=2)
    kv, weights = kv_sizes(spec, deployed), weight_sizes(spec, deployed)
    found = capacity(spec, deployed, GpuBudget("a gpu", 2, 24 * GIB, "a test"))
    lines = explain(spec, deployed, kv, weights, found)
    assert any("max(1, 8 KV heads // 2 ranks) = 4 heads, 65,536 bytes per token" in line for line in lines)
    assert any(line.startswith("overhead (mid, estimated)") for line in lines)
    assert any(line.startswith("available for KV = ceil(memory x 0.92)") for line in lines)
    assert lines[-2].endswith("one of them the null block")
    assert lines[-1] == f"fits: yes: {found.reason}"
    deployed = deployment(tensor_parallel_size=2, kv_cache_memory_bytes=GIB)
    found = capacity(spec, deployed)
    lines = explain(spec, deployed, kv, weights, found)
    assert not any("overhead" in line for line in lines)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_are_rounded_up(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks
