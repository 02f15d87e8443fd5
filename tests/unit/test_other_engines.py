"""Pools of paged, SGLang, TensorRT-LLM and llama.cpp, by hand; the rows of start-up logs."""

from __future__ import annotations

import csv
import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_models import toy_spec

import kvplan
from kvplan.core.deployment import Deployment
from kvplan.core.kv_cache import (
    Cache,
    CacheFormat,
    CompressedLatent,
    CrossAttention,
    FullAttention,
    LatentAttention,
    Mamba1State,
    ShortConv,
    SlidingWindow,
    SparseIndexer,
)
from kvplan.core.pools.llama_cpp import LlamaCppPool, LlamaCppRules, llama_cpp_stages
from kvplan.core.pools.paged import ContiguousPool, ContiguousRules, PagedPool
from kvplan.core.pools.sglang import SglangPool, SglangRules, num_prefill_graphs, sglang_stages
from kvplan.core.pools.tensorrt_llm import TensorrtLlmPool, TensorrtLlmRules, tensorrt_llm_stages
from kvplan.core.weights import WHOLE_MODEL
from kvplan.errors import InputError

MIB = 1 << 20
GIB = 1 << 30
ALL = WHOLE_MODEL
#: 4 heads x (8 + 8) x 2 bytes = 128 bytes a token.
FULL = FullAttention(4, 8)
WINDOW = SlidingWindow(4, 8, 100)
#: 32 channels x 3 columns x 2 bytes = 192 bytes, or 384 in float32.
CONV = ShortConv(32, 4)


def deployment(form: str = "bfloat16", **changes: Any) -> Deployment:
    """In 16 bits unless said."""
    return Deployment(seq=1, max_model_len=4096, cache=CacheFormat("bfloat16", form), **changes)


# paged


def test_the_plain_formula_has_one_block_over_all_layers_and_no_null_block() -> None:
    pool = PagedPool(toy_spec(FULL, FULL, FULL), deployment(block_size=16))
    assert pool.bytes_per_block() == 3 * 128 * 16
    assert (pool.blocks(1), pool.blocks(16), pool.blocks(17)) == (1, 1, 2)
    assert pool.share(100 * 6144 + 6143, ALL) == (100, 614_400, None)
    assert pool.null_blocks == 0
    assert pool.token_line(100, 160) == (1600, 10.0)


def test_in_the_plain_formula_windows_keep_all_tokens() -> None:
    pool = PagedPool(toy_spec(FULL, WINDOW), deployment(block_size=16))
    assert pool.bytes_per_block() == 2 * 128 * 16
    assert pool.blocks(1600) == 100


def test_in_the_plain_formula_a_state_takes_whole_blocks() -> None:
    # 192 bytes of state in blocks of 128 x 1: 2 blocks beside those of the tokens.
    pool = PagedPool(toy_spec(FULL, CONV), deployment(block_size=1))
    assert pool.blocks(10) == 12
    assert [group.blocks_per_sequence for group in pool.groups(10)] == [10, 2]
    alone = PagedPool(toy_spec(CONV), deployment(block_size=16))
    assert (alone.bytes_per_block(), alone.blocks(10)) == (192, 1)


def test_the_paged_budget_is_the_share_less_what_is_taken() -> None:
    pool = PagedPool(toy_spec(FULL), deployment(gpu_memory_utilization=0.9))
    assert pool.kv_memory(1000, 300) == 600


# Contiguous memory


@pytest.mark.parametrize(
    ("engine", "block_size", "blocks"),
    [
        # The longest that is served is 4,096.
        ("static", 1, (4096, 4096)),
        ("orca-max", 16, (256, 256)),
        ("orca-oracle", 1, (512, 1024)),
        ("orca-oracle", 16, (32, 64)),
        ("orca-pow2", 16, (32, 64)),
    ],
)
def test_a_sequence_takes_what_is_reserved_for_it(
    engine: str, block_size: int, blocks: tuple[int, int]
) -> None:
    pool = ContiguousPool(toy_spec(FULL), deployment(engine=engine, block_size=block_size))
    assert (pool.blocks(500), pool.blocks(513)) == blocks
    assert pool.allocated_bytes(500) == blocks[0] * block_size * 128


def test_the_batch_of_an_engine_that_splits_no_prompt_holds_the_longest() -> None:
    rules = ContiguousRules("orca-max")
    assert rules.fitted_batch(2560, 256, 2048, chunked_prefill=True) == 2560
    assert rules.fitted_batch(2560, 256, 8192, chunked_prefill=True) == 8192


# SGLang


def test_a_pool_of_tokens_has_as_many_as_the_memory_holds_in_whole_pages() -> None:
    assert (
        SglangPool(toy_spec(FULL, FULL), deployment(block_size=1)).share(256 * 1000 + 255, ALL).num_blocks
        == 1000
    )
    pool = SglangPool(toy_spec(FULL, FULL), deployment(block_size=64))
    share = pool.share(256 * 1000, ALL)
    assert share.num_blocks == 15  # 1000 tokens are 15.6 pages
    assert share.pool_bytes == 16 * 64 * 256  # and a page for writes that go nowhere
    assert pool.token_line(15, 960) == (960, 1.0)


def test_latents_and_indexers_have_a_row_each() -> None:
    caches = (LatentAttention(512, 64), SparseIndexer(128))
    # 576 x 2 + 128 + 4; in fp8 512 + 4 x 4 + 64 x 2 + 132.
    assert SglangPool(toy_spec(*caches), deployment(block_size=64)).bytes_per_block() == 64 * 1284
    assert (
        SglangPool(toy_spec(*caches), deployment("fp8_ds_mla", block_size=64)).bytes_per_block() == 64 * 788
    )
    # Half a byte an element and a byte for 16.
    assert (
        SglangPool(toy_spec(caches[0]), deployment("fp4_mx_block16", block_size=1)).bytes_per_block() == 324
    )


@pytest.mark.parametrize(
    ("form", "row"), [("fp8_e5m2", 64), ("mxfp8", 66), ("nvfp4", 32), ("fp4_mx_block16", 36)]
)
def test_forms_of_eight_and_four_bits(form: str, row: int) -> None:
    # 4 heads x 16 elements; the scales of nvfp4 are counted in each head alone, of 8 elements none.
    assert SglangPool(toy_spec(FULL), deployment(form, block_size=1)).bytes_per_block() == row


def test_windows_have_a_pool_of_their_own_in_architectures_that_sglang_knows() -> None:
    # 128 + 0.8 x 128 = 230.4 bytes a token; 10,000 tokens, of windows 8,000.
    model = toy_spec(FULL, WINDOW, architecture="GptOssForCausalLM")
    pool = SglangPool(model, deployment(block_size=1))
    assert pool.bytes_per_block() == 231
    assert pool.share(2_304_000, ALL).num_blocks == 10_000
    # 1,000 tokens: the whole layers are scarcer; 101: both alike, 101 / 0.8 = 126.25 rows of the scarcer pool.
    assert (pool.blocks(1000), pool.blocks(101)) == (1000, 127)
    assert pool.allocated_bytes(1000) == 1000 * 128 + 101 * 128
    elsewhere = SglangPool(toy_spec(FULL, WINDOW), deployment(block_size=1))
    assert elsewhere.bytes_per_block() == 256
    off = SglangPool(model, deployment(block_size=1, hybrid_kv_cache_manager=False))
    assert off.bytes_per_block() == 256


def test_a_pool_of_windows_that_holds_no_window_is_refused() -> None:
    pool = SglangPool(toy_spec(FULL, WINDOW, architecture="GptOssForCausalLM"), deployment(block_size=1))
    assert pool.share(231 * 126, ALL).num_blocks == 0
    assert pool.share(231 * 130, ALL).num_blocks == 130


def test_layers_of_windows_alone_need_no_ratio() -> None:
    pool = SglangPool(toy_spec(WINDOW, architecture="GptOssForCausalLM"), deployment(block_size=1))
    assert (pool.bytes_per_block(), pool.blocks(50), pool.blocks(5000)) == (128, 50, 101)


def test_states_take_their_part_first_and_limit_the_requests() -> None:
    # 0.9 / 1.9 of 19,200 bytes are 9,094.7: (9,094.7 - 192) // 192 = 46 slots and one for padding: 9,024 bytes.
    pool = SglangPool(toy_spec(FULL, CONV), deployment(block_size=1))
    share = pool.share(19_200, ALL)
    assert share.num_blocks == (19_200 - 47 * 192) // 128 == 79
    assert share.sequences == 46 // 5  # three slots a request, and two as steps overlap
    assert (
        SglangPool(toy_spec(FULL, CONV), deployment(async_scheduling=False)).share(19_200, ALL).sequences
        == 15
    )


def test_without_a_radix_cache_there_is_a_slot_for_each_request_that_may_run() -> None:
    settings: dict[str, Any] = {"enable_prefix_caching": False, "max_num_seqs": 8, "block_size": 1}
    pool = SglangPool(toy_spec(FULL, CONV), deployment(is_max_num_seqs_given=True, **settings))
    assert pool.share(19_200, ALL)[:3] == (136, 9 * 192 + 137 * 128, 8)
    not_given = SglangPool(toy_spec(FULL, CONV), deployment(**settings))
    assert not_given.share(19_200, ALL).sequences == 46


def test_of_states_alone_the_slots_are_the_limit() -> None:
    pool = SglangPool(toy_spec(Mamba1State(32, 4, 4)), deployment(block_size=1))
    assert pool.blocks(1000) == 0
    assert pool.share(10 * GIB, ALL).sequences is not None


def test_the_static_share_follows_the_gpu() -> None:
    rules = SglangRules()
    settings: dict[str, Any] = {
        "ranks": 1,
        "max_num_batched_tokens": 8192,
        "enforce_eager": False,
        "caches": (FULL,),
    }
    # 80 GiB: 512 + 1.5 x 8192 + 128 + 2 x 256 + 8 x 58 = 13,904 MiB of 81,920.
    assert rules.memory_share(memory_bytes=80 * GIB, **settings) == round(1 - 13_904 / 81_920, 3)
    latent = settings | {"caches": (LatentAttention(512, 64),)}
    # 1,536 for the graphs of latents instead of 464.
    assert rules.memory_share(memory_bytes=80 * GIB, **latent) == round(1 - 14_976 / 81_920, 3)
    eager = settings | {"enforce_eager": True}
    assert rules.memory_share(memory_bytes=80 * GIB, **eager) == round(1 - 12_928 / 81_920, 3)
    # 24 GiB and chunks of 4096: 512 + 6,144 + 128 + 2 x 48 + 8 x 50 = 7,280.
    small = settings | {"max_num_batched_tokens": 4096}
    assert rules.memory_share(memory_bytes=24 * GIB, **small) == round(1 - 7_280 / 24_576, 3)
    assert num_prefill_graphs(4096) == 50
    assert rules.memory_share(memory_bytes=1, **settings) == 0.0


@pytest.mark.parametrize(
    ("gib", "chunk"),
    [(None, 4096), (15, 2048), (24, 4096), (40, 4096), (80, 8192), (141, 8192), (180, 16384)],
)
def test_the_chunk_of_a_prefill_follows_the_gpu(gib: int | None, chunk: int) -> None:
    assert SglangRules().batch_limits(None if gib is None else gib * GIB, "")[0] == chunk


def test_sparse_latents_take_the_form_of_the_gpu() -> None:
    caches = (LatentAttention(512, 64), SparseIndexer(128))

    def form(asked: str, capability: str) -> str:
        return SglangRules().kv_form(
            asked, spec=toy_spec(*caches), dtype="bfloat16", compute_capability=capability
        )[0]

    assert (form("auto", "9.0"), form("auto", "10.0")) == ("bfloat16", "fp8_e4m3")
    assert (form("fp8_e4m3", "9.0"), form("fp8_e4m3", "10.0")) == ("fp8_ds_mla", "fp8_e4m3")
    with pytest.raises(InputError, match="no KV cache of the form nvfp4"):
        form("nvfp4", "10.0")
    with pytest.raises(InputError, match='unknown KV-cache dtype "int8"'):
        form("int8", "10.0")


@pytest.mark.parametrize(
    ("gpu", "tokens"), [(None, 1), ("9.0", 1), ("10.0", 64), ("10.3", 64), ("12.0", 1), ("gfx942", 1)]
)
def test_pages_follow_the_generation_and_other_makers_have_none(gpu: str | None, tokens: int) -> None:
    assert SglangRules().default_block_size([FullAttention(8, 128)], "bfloat16", gpu)[0] == tokens


def test_extra_layers_go_to_the_last_stages_in_sglang_and_to_the_first_in_tensorrt_llm() -> None:
    assert [stage.first for stage in sglang_stages(10, 4)] == [0, 2, 4, 7]
    assert [stage.first for stage in tensorrt_llm_stages(10, 4)] == [0, 3, 6, 8]
    # llama.cpp counts the output as a layer: 11 among 4, of which the last has the output.
    assert [stage.first for stage in llama_cpp_stages(10, 4)] == [0, 3, 6, 9]
    for split in (sglang_stages, tensorrt_llm_stages, llama_cpp_stages):
        with pytest.raises(InputError, match="cannot be shared out among 3"):
            split(2, 3)


# TensorRT-LLM


def test_tokens_are_rounded_up_to_whole_blocks() -> None:
    # 1,000 tokens of 256 bytes fit; 32 blocks of 32 are 1,024 tokens, a little more than there is room for.
    pool = TensorrtLlmPool(toy_spec(FULL, FULL), deployment(block_size=32))
    assert pool.share(256_000, ALL) == (32, 32 * 32 * 256, None)
    assert pool.share(256 * 992, ALL).num_blocks == 31
    assert pool.token_line(32, 512) == (1024, 2.0)


def test_the_fraction_is_of_what_is_free() -> None:
    pool = TensorrtLlmPool(toy_spec(FULL), deployment(block_size=32, gpu_memory_utilization=0.9))
    assert pool.kv_memory(1000, 300) == 630


def test_tensorrt_llm_refuses_states_and_odd_blocks() -> None:
    with pytest.raises(InputError, match="states such as short_conv is not known"):
        TensorrtLlmPool(toy_spec(FULL, CONV), deployment(block_size=32))
    with pytest.raises(InputError, match="no blocks of 48 tokens"):
        TensorrtLlmPool(toy_spec(FULL), deployment(block_size=48))


@pytest.mark.parametrize(("form", "row"), [("fp8", 64), ("int8", 64), ("float32", 256)])
def test_forms_of_tensorrt_llm(form: str, row: int) -> None:
    assert TensorrtLlmPool(toy_spec(FULL), deployment(form, block_size=2)).bytes_per_block() == 2 * row


def test_a_checkpoint_decides_the_form_where_tensorrt_llm_has_it() -> None:
    def form(checkpoint: str | None) -> str:
        model = replace(toy_spec(FULL), kv_cache_dtype=checkpoint)
        return TensorrtLlmRules().kv_form("auto", spec=model, dtype="bfloat16", compute_capability=None)[0]

    assert (form("fp8"), form("nvfp4"), form("odd"), form(None)) == ("fp8", "nvfp4", "bfloat16", "bfloat16")


# llama.cpp


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("f32", 2 * 1024 * 4),
        ("f16", 2 * 1024 * 2),
        ("q8_0", 2 * 32 * 34),
        ("q5_1", 2 * 32 * 24),
        ("q5_0", 2 * 32 * 22),
        ("q4_1", 2 * 32 * 20),
        ("q4_0", 2 * 32 * 18),
        ("iq4_nl", 2 * 32 * 18),
        ("q8_0/q4_0", 32 * 34 + 32 * 18),
        ("q4_0/q1_0", 32 * 18 + 8 * 18),
    ],
)
def test_types_of_keys_and_values(form: str, row: int) -> None:
    # 8 heads x 128 elements = 1,024: 32 blocks of 32, or 8 of 128.
    pool = LlamaCppPool(toy_spec(FullAttention(8, 128)), deployment(form))
    assert pool.bytes_per_block() == 256 * row


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    pool = LlamaCppPool(toy_spec(FullAttention(1, 80)), deployment("q8_0"))
    with pytest.raises(InputError, match="80 elements are no whole blocks of 32 of q8_0"):
        pool.bytes_per_block()


def test_a_latent_is_a_key_alone_and_an_indexer_one_more() -> None:
    pool = LlamaCppPool(toy_spec(LatentAttention(512, 64), SparseIndexer(128)), deployment("q8_0/q8_0"))
    assert pool.bytes_per_block() == 256 * (576 // 32 * 34 + 128 // 32 * 34)


def test_four_slots_share_a_context_unless_a_number_is_asked_for() -> None:
    shared = LlamaCppPool(toy_spec(FULL), deployment("f16", max_num_seqs=4))
    assert shared.share(100 * 256 * 128, ALL) == (100, 100 * 256 * 128, 4)
    assert shared.start_check_blocks(100) == 100
    apart = LlamaCppPool(toy_spec(FULL), deployment("f16", max_num_seqs=3, is_max_num_seqs_given=True))
    assert apart.share(100 * 256 * 128, ALL) == (99, 99 * 256 * 128, 3)
    assert apart.start_check_blocks(99) == 33


def test_a_context_is_padded_for_each_stream() -> None:
    pool = LlamaCppPool(toy_spec(FULL), deployment("f16", max_num_seqs=3, is_max_num_seqs_given=True))
    assert pool.cache_bytes(1000) == 3 * 512 * 128  # 333 cells each, padded to 512


def test_windows_have_cells_for_the_window_and_a_batch() -> None:
    caches = (FULL, WINDOW)
    one: dict[str, Any] = {"max_num_seqs": 1, "is_max_num_seqs_given": True, "max_num_batched_tokens": 512}
    pool = LlamaCppPool(toy_spec(*caches), deployment("f16", **one))
    # 100 + 512 padded to 768; never more than the context.
    assert pool.cache_bytes(8192) == (8192 + 768) * 128
    assert pool.cache_bytes(256) == (256 + 256) * 128
    shared = LlamaCppPool(toy_spec(*caches), deployment("f16", max_num_seqs=4, max_num_batched_tokens=512))
    assert shared.cache_bytes(8192) == (8192 + 1024) * 128  # four windows: 912 cells
    two = LlamaCppPool(toy_spec(*caches), deployment("f16", **(one | {"max_num_seqs": 2})))
    assert two.cache_bytes(8192) == (8192 + 2 * 768) * 128
    full = LlamaCppPool(
        toy_spec(*caches), deployment("f16", hybrid_kv_cache_manager=False, **one)
    )  # --swa-full
    assert full.cache_bytes(8192) == 2 * 8192 * 128


def test_the_largest_context_leaves_room_for_windows_and_states() -> None:
    caches = (FULL, WINDOW, CONV)
    deployed = deployment("f16", max_num_seqs=1, is_max_num_seqs_given=True, max_num_batched_tokens=512)
    deployed = deployed._replace(
        cache=deployed.cache._replace(mamba_cache_dtype="float32", mamba_ssm_cache_dtype="float32")
    )
    pool = LlamaCppPool(toy_spec(*caches), deployed)
    fixed = 768 * 128 + 384
    assert pool.share(fixed + 10 * 256 * 128, ALL) == (10, fixed + 10 * 256 * 128, 1)
    assert pool.share(fixed + 10 * 256 * 128 - 1, ALL).num_blocks == 9
    assert pool.share(100, ALL) == (0, 0, 0)


def test_states_alone_need_no_cells() -> None:
    pool = LlamaCppPool(toy_spec(CONV), deployment("f16", max_num_seqs=4))
    assert pool.blocks(1000) == 0
    assert pool.share(4 * 192, ALL).sequences == 4
    assert pool.share(4 * 192 - 1, ALL).sequences == 0


def test_the_cache_is_f16_whatever_the_dtype() -> None:
    def form(asked: str) -> str:
        model = replace(toy_spec(FULL), kv_cache_dtype="fp8")
        return LlamaCppRules().kv_form(asked, spec=model, dtype="bfloat16", compute_capability=None)[0]

    assert (form("auto"), form("q8_0"), form("q8_0/q5_1")) == ("f16", "q8_0", "q8_0/q5_1")
    for wrong in ("bfloat16", "q8_0/", "q8_0/fp8", "q8_0/q8_0/q8_0", "/q8_0"):
        with pytest.raises(InputError, match="unknown KV-cache type"):
            form(wrong)


# All


@pytest.mark.parametrize("pool", [SglangPool, TensorrtLlmPool, LlamaCppPool])
@pytest.mark.parametrize("cache", [CrossAttention(4, 8), CompressedLatent(512, 4)])
def test_kinds_whose_memory_is_not_known_are_refused(pool: type, cache: Cache) -> None:
    with pytest.raises(InputError, match=f"keeps layers of the kind {cache.kind} is not known"):
        pool(toy_spec(FULL, cache), deployment(block_size=32))


# Logs


def test_every_row_of_a_log_that_says_enough_comes_out(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shared / "truth" / "kv_logs.csv"
    if not path.is_file():
        pytest.skip(f"no file {path}")
    monkeypatch.syspath_prepend(Path(kvplan.__file__).resolve().parents[1] / "benchmarks")
    script = importlib.import_module("other_engines_against_logs")
    with path.open(encoding="utf-8", newline="") as lines:
        outcomes = [found for row in csv.DictReader(lines) if (found := script.check_row(row))]
    wrong = [found for found in outcomes if found.checks and not found.is_right]
    assert [found.name for found in wrong if found.name not in script.REASONS] == []
    consistent = [found for found in outcomes if found.consistent == "yes"]
    assert len(consistent) >= 30
    assert all(found.checks for found in consistent)
