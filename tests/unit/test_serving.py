"""From options to a deployment: defaults by version and GPU, what the engine refuses, and where each came from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvplan.config import load_gpu, load_model
from kvplan.core.kv_cache import (
    CompressedLatent,
    CrossAttention,
    FullAttention,
    GatedDeltaNet,
    LatentAttention,
    LayerCache,
    SlidingWindow,
    SparseIndexer,
)
from kvplan.core.model import Mlp, ModelSpec, PositionScaling
from kvplan.errors import InputError
from kvplan.options import Resolver, ServingOptions, flag, settings_dict
from kvplan.serving import Served, find_gpu, serve

GIB = 1 << 30


def served(
    model: str | ModelSpec = "llama-2-7b",
    gpu: str | None = None,
    count: int | None = None,
    *,
    seq: int | None = None,
    **values: Any,
) -> tuple[Served, Resolver[ServingOptions]]:
    resolver = Resolver(ServingOptions.of(values))
    spec = load_model(model) if isinstance(model, str) else model
    found = load_gpu(gpu) if gpu else None
    return serve(spec, resolver, gpu=found, gpu_count=count, seq=seq), resolver


def refused(model: str | ModelSpec = "llama-2-7b", **values: Any) -> InputError:
    with pytest.raises(InputError) as error:
        served(model, **values)
    return error.value


def model_with(*caches: Any, **changes: Any) -> ModelSpec:
    """Llama-2-7B's shape with other caches, 8 KV heads and no known weights beside its total."""
    layers = tuple(LayerCache(i, cache) for i, cache in enumerate(caches))
    spec = load_model("llama-2-7b")
    return replace(spec, num_layers=len(caches), num_kv_heads=8, layers=layers, **changes)


# Where settings come from


def test_every_setting_says_where_it_came_from() -> None:
    _, resolver = served(block_size=32)
    settings = settings_dict(resolver.settings)
    assert settings["engine"] == {"value": "vllm@0.33", "source": "default: the newest rules held"}
    assert settings["block_size"] == {"value": 32, "source": "--block-size"}
    assert settings["max_model_len"] == {"value": 4096, "source": "the model's maximum"}
    assert settings["tensor_parallel_size"] == {"value": 1, "source": "default of vllm 0.33"}
    assert settings["dtype"] == {"value": "float16", "source": "the model's own (default of vllm 0.33)"}
    assert settings["kv_cache_dtype"] == {"value": "float16", "source": "as dtype (default of vllm 0.33)"}
    assert list(settings) == sorted(settings)


def test_budgets_are_noted_only_where_they_are_given() -> None:
    _, resolver = served()
    assert "kv_cache_memory_bytes" not in resolver.settings
    found, resolver = served(kv_cache_memory_bytes="1GiB", num_gpu_blocks_override=9)
    assert found.deployment.kv_cache_memory_bytes == GIB
    assert resolver.settings["num_gpu_blocks_override"].value == 9


# Defaults by version and GPU


@pytest.mark.parametrize(
    ("gpu", "engine", "batch", "seqs"),
    [
        (None, "vllm", 2048, 256),
        ("rtx-4090", "vllm", 2048, 256),
        ("a100-80gb", "vllm", 2048, 256),
        ("a100-80gb", "vllm@0.8.5", 8192, 1024),
        ("h100-80gb", "vllm", 8192, 1024),
        ("b200", "vllm@0.33", 16384, 1024),
        ("b200", "vllm@0.26", 8192, 1024),
    ],
)
def test_batch_limits_depend_on_gpu_and_version(gpu: str | None, engine: str, batch: int, seqs: int) -> None:
    deployed = served(gpu=gpu, engine=engine)[0].deployment
    assert (deployed.max_num_batched_tokens, deployed.max_num_seqs) == (batch, seqs)


def test_a_small_budget_lowers_the_default_number_of_sequences_but_not_a_given_one() -> None:
    assert served(max_num_batched_tokens=100)[0].deployment.max_num_seqs == 100
    error = refused(max_num_batched_tokens=100, max_num_seqs=101)
    assert error.what == "max_num_batched_tokens 100 is below max_num_seqs 101"
    assert error.where == "--max-num-batched-tokens"


def test_few_short_sequences_need_no_larger_batch() -> None:
    assert served(max_num_seqs=2, max_model_len=100)[0].deployment.max_num_batched_tokens == 200
    old = served(max_num_seqs=2, max_model_len=100, engine="vllm@0.11")[0].deployment
    assert old.max_num_batched_tokens == 2048


@pytest.mark.parametrize(
    ("engine", "utilization", "asynchronous"),
    [
        ("vllm@0.11", 0.9, False),
        ("vllm@0.19", 0.9, True),
        ("vllm@0.21", 0.92, True),
        ("vllm@0.33", 0.92, True),
    ],
)
def test_other_defaults_by_version(engine: str, utilization: float, asynchronous: bool) -> None:
    deployed = served(engine=engine)[0].deployment
    assert deployed.gpu_memory_utilization == utilization
    assert deployed.async_scheduling is asynchronous
    assert deployed.version == engine.removeprefix("vllm@")
    assert served(engine=engine, gpu_memory_utilization=0.5)[0].deployment.gpu_memory_utilization == 0.5


@pytest.mark.parametrize(
    ("engine", "caching"), [("vllm@0.24", False), ("vllm@0.26", True), ("vllm@0.33", True)]
)
def test_prefix_caching_of_hybrids_is_on_since_0_26(engine: str, caching: bool) -> None:
    hybrid = model_with(FullAttention(8, 128), GatedDeltaNet(16, 128, 32, 128, 4))
    assert served(hybrid, engine=engine)[0].deployment.enable_prefix_caching is caching
    assert served("llama-2-7b", engine=engine)[0].deployment.enable_prefix_caching
    given = served(hybrid, engine=engine, enable_prefix_caching=not caching)[0].deployment
    assert given.enable_prefix_caching is not caching


def test_prefix_caching_is_off_where_there_are_only_states() -> None:
    assert not served(model_with(GatedDeltaNet(16, 128, 32, 128, 4)))[0].deployment.enable_prefix_caching


# Parallelism


def test_a_number_of_gpus_alone_is_tensor_parallel() -> None:
    found, resolver = served(gpu="h100-80gb", count=4)
    assert found.deployment.tensor_parallel_size == found.deployment.gpus == 4
    assert resolver.settings["tensor_parallel_size"].source == "--gpu"
    assert found.budget is not None
    assert found.budget.count == 4


def test_a_number_of_gpus_must_be_the_product_of_the_degrees() -> None:
    found, _ = served(
        gpu="h100-80gb", count=16, tensor_parallel_size=4, pipeline_parallel_size=2, data_parallel_size=2
    )
    assert found.deployment.gpus == 16
    error = refused(gpu="h100-80gb", count=4, tensor_parallel_size=2)
    assert (error.what, error.where) == ("4 GPUs for tensor parallel size 2", "--gpu")
    assert error.hint == "name 2 GPUs, or leave the number out"
    error = refused(gpu="h100-80gb", count=4, pipeline_parallel_size=2, data_parallel_size=3)
    assert error.what == "4 GPUs for tensor parallel size 1 x pipeline parallel size 2 x data parallel size 3"


def test_experts_are_shared_out_only_where_there_are_any() -> None:
    assert served("qwen3-30b-a3b", enable_expert_parallel=True)[0].deployment.enable_expert_parallel
    dense = replace(load_model("llama-2-7b"), mlp=Mlp(11008))
    assert refused(dense, enable_expert_parallel=True).where == "--enable-expert-parallel"


def test_context_parallelism_divides_the_tensor_parallel_ranks() -> None:
    latent = model_with(LatentAttention(512, 64))
    found = served(latent, tensor_parallel_size=8, decode_context_parallel_size=4)[0]
    assert found.deployment.cache.decode_context_parallel_size == 4
    error = refused(latent, tensor_parallel_size=8, decode_context_parallel_size=3)
    assert error.what == "decode context parallel size 3 does not divide tensor parallel size 8"
    assert error.where == "--decode-context-parallel-size"


@pytest.mark.parametrize(
    ("tensor", "contexts", "hint"),
    [
        (8, 2, "leave it out, or use more tensor parallel ranks"),
        (16, 4, "leave it out, or use more tensor parallel ranks"),
    ],
)
def test_context_parallelism_of_heads_needs_each_head_on_as_many_ranks(
    tensor: int, contexts: int, hint: str
) -> None:
    # 32 attention heads, 8 KV heads: 8 ranks have each once, 16 twice, 32 four times.
    heads = model_with(FullAttention(8, 128))
    error = refused(heads, tensor_parallel_size=tensor, decode_context_parallel_size=contexts)
    assert "needs each of 8 KV heads" in error.what
    assert error.hint == (hint if tensor == 8 else "use at most 2")
    assert served(heads, tensor_parallel_size=16, decode_context_parallel_size=2)[0].capacity is None


def test_context_parallelism_divides_the_attention_heads_of_a_kv_head() -> None:
    heads = model_with(FullAttention(8, 128), num_heads=24)
    heads = replace(heads, num_heads=72)  # 9 for each KV head
    error = refused(heads, tensor_parallel_size=72, decode_context_parallel_size=8)
    assert (
        error.what == "decode context parallel size 8 does not divide the 9 attention heads of each KV head"
    )


@pytest.mark.parametrize(
    ("caches", "engine", "why"),
    [
        ((LatentAttention(512, 64), SlidingWindow(8, 144, 512)), "vllm", "does not go with sliding windows"),
        (
            (LatentAttention(512, 64), GatedDeltaNet(16, 128, 32, 128, 4)),
            "vllm@0.24",
            "layers of several kinds",
        ),
        ((LatentAttention(512, 64),), "vllm@0.8.5", "does not go with this version"),
    ],
)
def test_what_context_parallelism_does_not_go_with(caches: tuple[Any, ...], engine: str, why: str) -> None:
    error = refused(
        model_with(*caches),
        engine=engine,
        block_size=64,
        tensor_parallel_size=2,
        decode_context_parallel_size=2,
    )
    assert why in error.what
    assert error.where == "--decode-context-parallel-size"


# Drafts


def test_a_models_own_layers_draft_by_default() -> None:
    own = tuple(LayerCache(1 + i, FullAttention(8, 128)) for i in range(2))
    spec = model_with(FullAttention(8, 128), draft_layers=own)
    deployed = served(spec, num_speculative_tokens=2)[0].deployment
    assert (deployed.speculative_method, deployed.drafts) == ("mtp", own)
    assert deployed.cache.num_speculative_tokens == 2
    assert served(spec)[0].deployment.drafts == ()
    named = served(spec, num_speculative_tokens=1, speculative_method="deepseek_mtp")[0].deployment
    assert named.speculative_method == "mtp"


def test_more_tokens_than_layers_are_a_multiple_of_them() -> None:
    own = tuple(LayerCache(1 + i, FullAttention(8, 128)) for i in range(2))
    spec = model_with(FullAttention(8, 128), draft_layers=own)
    assert served(spec, num_speculative_tokens=4)[0].deployment.cache.num_speculative_tokens == 4
    error = refused(spec, num_speculative_tokens=3)
    assert error.what == "3 speculative tokens are no multiple of the 2 layers that draft one each"


def test_ways_to_draft_without_layers() -> None:
    deployed = served(num_speculative_tokens=3, speculative_method="ngram")[0].deployment
    assert (deployed.speculative_method, deployed.drafts) == ("ngram", ())
    old = served(num_speculative_tokens=3, speculative_method="ngram", engine="vllm@0.26")[0].deployment
    assert (deployed.async_scheduling, old.async_scheduling) == (True, False)


def test_a_draft_model_brings_its_layers_and_weights() -> None:
    found, _ = served("llama-3.1-8b", num_speculative_tokens=3, speculative_model="llama-3.2-1b")
    deployed = found.deployment
    assert deployed.speculative_method == "draft_model"
    assert [item.layer for item in deployed.drafts] == list(range(32, 48))  # 16 layers after the model's 32
    assert deployed.draft_weights_bytes == load_model("llama-3.2-1b").weights.total_bytes("bfloat16")
    eagle, _ = served(
        "llama-3.1-8b",
        num_speculative_tokens=3,
        speculative_model="llama-3.2-1b",
        speculative_method="eagle3",
    )
    assert eagle.deployment.speculative_method == "eagle3"


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"speculative_method": "ngram"}, "--speculative-method"),
        ({"speculative_model": "llama-3.2-1b"}, "--speculative-model"),
        ({"num_speculative_tokens": 2}, "--num-speculative-tokens"),
        ({"num_speculative_tokens": 2, "speculative_method": "mtp"}, "--speculative-method"),
        ({"num_speculative_tokens": 2, "speculative_method": "eagle3"}, "--speculative-method"),
        ({"num_speculative_tokens": 2, "speculative_model": "gpt-9"}, "--speculative-model"),
    ],
)
def test_drafts_that_lack_something_are_refused(values: dict[str, Any], where: str) -> None:
    assert refused(**values).where == where


def test_a_draft_whose_weights_are_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = load_model("llama-3.2-1b")
    unknown = replace(
        known, weights=known.weights._replace(parameters=None, groups=(), unlisted="its config is odd")
    )
    monkeypatch.setattr("kvplan.serving.load_model", lambda *_, **__: unknown)
    error = refused(load_model("llama-3.1-8b"), num_speculative_tokens=2, speculative_model="llama-3.2-1b")
    assert error.what == "the size of the draft's weights is not known: its config is odd"


# Dtypes


@pytest.mark.parametrize(
    ("given", "dtype"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")]
)
def test_a_dtype_may_have_vllms_other_name(given: str, dtype: str) -> None:
    deployed = served(dtype=given)[0].deployment
    assert (deployed.dtype, deployed.cache.kv_cache_dtype) == (dtype, dtype)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "int4"),
        ("kv_cache_dtype", "fp7"),
        ("mamba_cache_dtype", "int3"),
        ("mamba_ssm_cache_dtype", "x"),
    ],
)
def test_an_unknown_dtype_is_refused(name: str, value: str) -> None:
    error = refused(**{name: value})
    assert f'"{value}"' in error.what
    assert error.where == flag(name)


def test_a_cache_dtype_of_its_own_is_kept() -> None:
    cache = served(kv_cache_dtype="fp8", mamba_ssm_cache_dtype="float32")[0].deployment.cache
    assert (cache.dtype, cache.kv_cache_dtype) == ("float16", "fp8")
    assert (cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype) == (None, "float32")


def test_a_form_that_the_version_does_not_have_is_refused() -> None:
    error = refused(kv_cache_dtype="nvfp4", engine="vllm@0.19")
    assert (error.what, error.where) == ("vllm 0.19 has no KV cache of the form nvfp4", "--kv-cache-dtype")


def test_a_checkpoint_may_ask_for_its_own_form() -> None:
    spec = model_with(FullAttention(8, 128), kv_cache_dtype="fp8")
    found, resolver = served(spec)
    assert found.deployment.cache.kv_cache_dtype == "fp8"
    assert resolver.settings["kv_cache_dtype"].source == "as the checkpoint says (default of vllm 0.33)"
    assert served(spec, kv_cache_dtype="bfloat16")[0].deployment.cache.kv_cache_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("engine", "gpu", "asked", "form"),
    [
        ("vllm@0.11", "h100-80gb", None, "fp8_ds_mla"),
        ("vllm@0.24", "h100-80gb", None, "bfloat16"),
        ("vllm@0.24", "h100-80gb", "fp8", "fp8_ds_mla"),
        ("vllm@0.24", None, "fp8", "fp8_ds_mla"),
        ("vllm@0.33", "b200", "fp8", "fp8"),
        ("vllm@0.33", "rtx-pro-6000", None, "fp8_ds_mla"),
    ],
)
def test_sparse_latents_take_the_form_of_their_kernel(
    engine: str, gpu: str | None, asked: str | None, form: str
) -> None:
    spec = model_with(LatentAttention(512, 64), SparseIndexer(128), dtype="bfloat16")
    values = {} if asked is None else {"kv_cache_dtype": asked}
    assert served(spec, gpu=gpu, engine=engine, **values)[0].deployment.cache.kv_cache_dtype == form


# Block sizes


@pytest.mark.parametrize(
    ("caches", "gpu", "engine", "dtype", "size"),
    [
        ((FullAttention(8, 128),), "b200", "vllm", "auto", 16),
        ((LatentAttention(512, 64),), "h100-80gb", "vllm@0.11", "auto", 64),
        ((LatentAttention(512, 64),), "h100-80gb", "vllm", "auto", 16),
        ((LatentAttention(512, 64),), "h100-80gb", "vllm", "fp8", 64),
        ((LatentAttention(512, 64),), "b200", "vllm", "auto", 32),
        ((LatentAttention(512, 64),), "b200", "vllm@0.11", "auto", 128),
        ((LatentAttention(512, 64),), "a100-80gb", "vllm", "auto", 16),
        ((LatentAttention(512, 64), SparseIndexer(128)), "h100-80gb", "vllm", "auto", 64),
        ((CompressedLatent(512, 4),), "h100-80gb", "vllm", "auto", 256),
    ],
)
def test_block_sizes_by_gpu_and_version(
    caches: tuple[Any, ...], gpu: str, engine: str, dtype: str, size: int
) -> None:
    found = served(model_with(*caches), gpu=gpu, engine=engine, kv_cache_dtype=dtype, max_model_len=4096)
    assert found[0].deployment.block_size == size
    assert served(model_with(*caches), gpu=gpu, engine=engine, block_size=512)[0].deployment.block_size == 512


def test_a_block_holds_whole_latents_of_several_tokens() -> None:
    error = refused(model_with(CompressedLatent(512, 128), CompressedLatent(512, 4)), block_size=64)
    assert error.what == "block size 64 is no multiple of the 128 tokens that a latent stands for"
    assert error.where == "--block-size"


def test_a_state_beside_attention_sets_the_block() -> None:
    # A state of 3 x 8192 x 2 + 32 x 128 x 128 x 2 = 1,097,728 bytes; attention 8 x 256 x 2 = 4,096 a token: in
    # multiples of 16, and of 64 between checkpoints, 268 tokens become 320.
    hybrid = model_with(FullAttention(8, 128), GatedDeltaNet(16, 128, 32, 128, 4), dtype="bfloat16")
    assert served(hybrid)[0].kv.block_size == 320
    assert served(hybrid, engine="vllm@0.26")[0].kv.block_size == 272
    assert served(hybrid, enable_prefix_caching=False)[0].kv.block_size == 272
    assert served(hybrid, block_size=512)[0].kv.block_size == 512


# Cross attention


def test_cross_attention_reserves_for_the_batch_and_once_for_the_models_own_length() -> None:
    spec = model_with(CrossAttention(8, 128, 1500))
    assert served(spec)[0].deployment.cache.encoder_tokens == 2048
    assert served(spec, engine="vllm@0.11")[0].deployment.cache.encoder_tokens == 1500


# Lengths


def test_a_length_beyond_the_models_is_refused() -> None:
    error = refused(max_model_len=4097)
    assert error.what == "max_model_len 4,097 is beyond the 4,096 tokens that the engine lets the model have"
    assert served(max_model_len=4096)[0].deployment.max_model_len == 4096


def test_a_length_that_starts_short_of_the_models_is_told() -> None:
    spec = model_with(
        FullAttention(8, 128),
        max_position_embeddings=131_072,
        original_max_position_embeddings=4096,
        position_scalings=(PositionScaling("longrope"),),
    )
    found, _ = served(spec)
    assert found.deployment.max_model_len == 4096
    assert "before LongRoPE stretches positions" in found.warnings[0]
    assert served(spec, max_model_len=100_000)[0].deployment.max_model_len == 100_000


def test_where_positions_are_stretched_a_longer_length_is_a_warning() -> None:
    scaled = model_with(FullAttention(8, 128), position_scalings=(PositionScaling("llama3", 8.0),))
    found, _ = served(scaled, max_model_len=4097)
    assert found.deployment.max_model_len == 4097
    assert "only with VLLM_ALLOW_LONG_MAX_MODEL_LEN=1" in found.warnings[0]
    plain = model_with(FullAttention(8, 128), position_scalings=(PositionScaling("default"),))
    assert refused(plain, max_model_len=4097).where == "--max-model-len"


def test_without_a_maximum_the_length_must_be_given() -> None:
    endless = model_with(FullAttention(8, 128), max_position_embeddings=None)
    assert refused(endless).hint == "give --max-model-len"
    assert refused(endless, max_model_len="auto").what == "the model states no maximum length"
    assert served(endless, max_model_len=10_000)[0].deployment.max_model_len == 10_000


def test_the_automatic_length_is_the_longest_that_fits() -> None:
    # 101 blocks of 16 x 524,288 bytes, one of them the null block.
    found, resolver = served(max_model_len="auto", kv_cache_memory_bytes=101 * 8_388_608)
    assert found.deployment.max_model_len == found.deployment.seq == 1600
    assert resolver.settings["max_model_len"].source == "--max-model-len auto: the longest that fits"
    assert found.capacity is not None
    assert (found.capacity.fits, found.capacity.max_model_len_that_fits) == (True, 1600)
    assert (
        served(max_model_len="auto", kv_cache_memory_bytes=101 * 8_388_608, seq=100)[0].deployment.seq == 100
    )


def test_the_automatic_length_is_the_models_where_all_of_it_fits_or_none_does() -> None:
    assert served(max_model_len="auto")[0].deployment.max_model_len == 4096
    assert served(max_model_len="auto", kv_cache_memory_bytes="64GiB")[0].deployment.max_model_len == 4096
    none = served(max_model_len="auto", num_gpu_blocks_override=1)[0]
    assert none.deployment.max_model_len == 4096
    assert none.capacity is not None
    assert not none.capacity.fits


# GPUs


@pytest.mark.parametrize(
    ("text", "name", "count"), [("h100", "h100-80gb", None), ("8xh100", "h100-80gb", 8), ("1xl4", "l4", 1)]
)
def test_a_gpu_and_how_many(text: str, name: str, count: int | None) -> None:
    gpu, found = find_gpu(text)
    assert gpu is not None
    assert (gpu.name, found) == (name, count)


def test_no_gpu_several_and_none_of_one() -> None:
    assert find_gpu(None) == (None, None)
    for text in ("h100,l4", "all", "0xh100"):
        with pytest.raises(InputError) as error:
            find_gpu(text)
        assert error.value.where == "--gpu"


def test_memory_that_is_given_replaces_the_gpus() -> None:
    found = served(gpu="h100-80gb", gpu_memory="24GiB")[0].budget
    assert found is not None
    assert (found.memory_bytes, found.memory_source, found.name) == (24 * GIB, "--gpu-memory", "h100-80gb")
    unnamed = served(gpu_memory=24 * GIB)[0].budget
    assert unnamed is not None
    assert (unnamed.name, unnamed.count) == ("gpu", 1)


def test_a_gpu_whose_memory_is_not_known_needs_it_given() -> None:
    assert refused(gpu="l20").hint == "give --gpu-memory, such as 80GiB"
    assert served(gpu="l20", gpu_memory="45GiB")[0].capacity is not None


# Adapters


def test_slots_for_adapters_come_out_of_the_budget() -> None:
    plain, _ = served(gpu="l4")
    slots, resolver = served(gpu="l4", enable_lora=True, max_loras=2, max_lora_rank=8)
    assert plain.capacity is not None
    assert slots.capacity is not None
    taken = slots.capacity.ranks[0].extra_bytes - plain.capacity.ranks[0].extra_bytes
    # Rank 8 of each linear module in each of 32 layers, in and out: 4 of 4096 x 4096, 2 of 4096 x 11008, one of
    # 11008 x 4096; and of the embedding and the head, of 32,000 words each; 2 slots of 2 bytes.
    assert taken == 2 * 2 * 8 * (32 * (4 * 8192 + 3 * (4096 + 11008)) + 2 * (32_000 + 4096))
    assert plain.capacity.available_kv_bytes - slots.capacity.available_kv_bytes == taken
    assert resolver.settings["max_loras"].value == 2


@pytest.mark.parametrize("name", ["max_loras", "max_lora_rank"])
def test_settings_of_adapters_without_adapters_are_refused(name: str) -> None:
    assert refused(**{name: 2}).where == flag(name)


def test_adapters_of_a_model_whose_modules_are_not_known_are_refused() -> None:
    spec = load_model("llama-2-7b")
    unlisted = replace(spec, weights=spec.weights._replace(groups=()))
    assert refused(unlisted, enable_lora=True, gpu="l4").where == "--enable-lora"
