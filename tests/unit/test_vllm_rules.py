"""Each rule of vLLM at the versions where it changes, as read in their sources."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest

from kvplan.config import load_model
from kvplan.core.kv_cache import HEADS, STATES, LatentAttention
from kvplan.core.vllm_rules import StateMode, VllmRules, vllm_rules
from kvplan.errors import InputError

GIB = 1 << 30


def rules(version: str) -> VllmRules:
    return vllm_rules(version)


# Versions


@pytest.mark.parametrize(
    ("text", "number"),
    [("", (0, 33)), ("0.33", (0, 33)), ("0.24.0", (0, 24)), ("v0.19.1rc1", (0, 19)), ("0.8.5+cu121", (0, 8))],
)
def test_a_version_is_its_major_and_minor_number(text: str, number: tuple[int, int]) -> None:
    assert rules(text).number == number
    assert rules(text).version == f"{number[0]}.{number[1]}"


@pytest.mark.parametrize("text", ["0.34", "1.0", "0.5.4", "0.0"])
def test_versions_beyond_the_rules_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=f"the rules of vLLM {text} are not known") as error:
        rules(text)
    assert error.value.hint is not None
    assert "to 0.33" in error.value.hint


@pytest.mark.parametrize("text", ["latest", "0", "0.", "0.24 ", "00000.24", "0.24;rm"])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is no version of vLLM"):
        rules(text)


def test_asynchronous_scheduling_came_with_0_10() -> None:
    assert rules("0.9.2").missing_settings == {"async_scheduling"}
    assert rules("0.10.0").missing_settings == set()


# Memory and the check at the start


@pytest.mark.parametrize(
    ("version", "share"), [("0.8.5", 0.9), ("0.19", 0.9), ("0.20", 0.9), ("0.21", 0.92), ("0.33", 0.92)]
)
def test_utilization_rose_when_graphs_began_to_count(version: str, share: float) -> None:
    assert rules(version).gpu_memory_utilization == share


def test_the_null_block_is_left_out_of_the_check_since_0_33() -> None:
    assert not rules("0.26").reserves_null_block
    assert rules("0.33").reserves_null_block


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ("0.8.5", "blocks"),
        ("0.11", "groups"),
        ("0.19", "groups"),
        ("0.20", "groups"),
        ("0.21", "concurrency"),
    ],
)
def test_what_the_token_line_says(version: str, line: str) -> None:
    assert rules(version).token_line == line


@pytest.mark.parametrize(
    ("version", "fields", "lengths"),
    [
        # YaRN multiplies the original length, and since 0.33 leaves the stated one alone.
        (
            "0.26",
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}},
            8192,
        ),
        (
            "0.33",
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}},
            4096,
        ),
        ("0.33", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 8192),
        ("0.33", {"rope_scaling": {"rope_type": "dynamic", "factor": None}}, 4096),
        ("0.33", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 4096),
        ("0.33", {}, 4096),
    ],
)
def test_positions_are_stretched_by_kind_and_version(
    version: str, fields: dict[str, Any], lengths: int
) -> None:
    model = load_model("llama-2-7b", overrides=tuple(f"{k}={json.dumps(v)}" for k, v in fields.items()))
    assert rules(version).lengths(model) == (lengths, lengths)


def test_longrope_starts_at_the_original_length_since_0_19() -> None:
    given = ("original_max_position_embeddings=4096", 'rope_scaling={"type": "longrope"}')
    model = load_model("llama-3.1-8b", overrides=given)
    assert rules("0.11").lengths(model) == (131072, 131072)
    assert rules("0.19").lengths(model) == (4096, 131072)


# Batches


@pytest.mark.parametrize(
    ("version", "memory", "name", "limits"),
    [
        ("0.33", None, "", (2048, 256)),
        ("0.33", 24 * GIB, "rtx-4090", (2048, 256)),
        ("0.33", 70 * GIB - 1, "x", (2048, 256)),
        ("0.33", 70 * GIB, "x", (8192, 1024)),
        ("0.33", 79 * GIB, "A100-80GB", (2048, 256)),
        ("0.11", 79 * GIB, "a100-80gb", (2048, 256)),
        ("0.8.5", 79 * GIB, "a100-80gb", (8192, 1024)),
        ("0.33", 160 * GIB - 1, "x", (8192, 1024)),
        ("0.33", 160 * GIB, "b200", (16384, 1024)),
        ("0.26", 178 * GIB, "b200", (8192, 1024)),
        ("0.33", 119 * GIB, "gb10", (2048, 256)),
        ("0.26", 119 * GIB, "gb10", (8192, 1024)),
    ],
)
def test_batch_limits_follow_the_memory(
    version: str, memory: int | None, name: str, limits: tuple[int, int]
) -> None:
    assert rules(version).batch_limits(memory, name) == limits


@pytest.mark.parametrize(
    ("version", "length", "chunked", "batch"),
    [
        ("0.33", 4096, True, 2048),
        ("0.33", 5, True, 1280),  # 256 sequences of 5 tokens are all there is
        ("0.11", 5, True, 2048),
        ("0.33", 4096, False, 4096),
        ("0.33", 1000, False, 2048),
        ("0.11", 4096, False, 4096),
        ("0.11", 1000, False, 1000),
    ],
)
def test_batches_are_fitted_to_the_longest_sequence(
    version: str, length: int, chunked: bool, batch: int
) -> None:
    assert rules(version).fitted_batch(2048, 256, length, chunked_prefill=chunked) == batch


@pytest.mark.parametrize(
    ("version", "method", "default"),
    [
        ("0.11", None, False),
        ("0.19", None, True),
        ("0.19", "eagle3", True),
        ("0.24", "mtp", True),
        ("0.24", "qwen3_5_mtp", True),
        ("0.24", "ngram", False),
        ("0.24", "draft_model", False),
        ("0.24", "dspark", False),
        ("0.26", "dspark", True),
        ("0.26", "ngram", False),
        ("0.26", "suffix", False),
        ("0.33", "ngram", True),
        ("0.33", "draft_model", True),
        ("0.33", "suffix", False),
    ],
)
def test_asynchronous_scheduling_by_way_of_drafting(version: str, method: str | None, default: bool) -> None:
    assert rules(version).async_scheduling(method) is default


@pytest.mark.parametrize(
    ("version", "architecture", "method", "states", "experts", "second"),
    [
        ("0.19", "Qwen3ForCausalLM", None, False, False, False),
        ("0.24", "Qwen3ForCausalLM", None, False, False, True),
        ("0.24", "Qwen2ForCausalLM", None, False, False, False),
        ("0.26", "MixtralForCausalLM", None, False, True, False),
        ("0.28", "MixtralForCausalLM", None, False, True, True),
        ("0.26", "LlamaForCausalLM", None, False, False, True),
        ("0.26", "LlamaForCausalLM", "eagle3", False, False, True),
        ("0.26", "LlamaForCausalLM", "ngram", False, False, False),
        ("0.26", "GptOssForCausalLM", None, False, True, False),
        ("0.26", "DeepseekV2ForCausalLM", None, False, True, True),
        ("0.26", "Qwen3_5ForConditionalGeneration", None, True, False, False),
        ("0.33", "GptOssForCausalLM", "ngram", True, True, True),
        ("0.33", "LlamaForCausalLM", "suffix", False, False, False),
    ],
)
def test_which_models_the_second_runner_is_the_default_for(
    version: str, architecture: str, method: str | None, states: bool, experts: bool, second: bool
) -> None:
    found = rules(version).runner_v2(architecture, method, has_states=states, has_experts=experts)
    assert found is second


@pytest.mark.parametrize(
    ("version", "stages", "asynchronous", "second", "batches"),
    [
        ("0.24", 1, True, True, 1),
        ("0.24", 4, True, True, 1),
        ("0.26", 1, False, True, 1),
        ("0.26", 4, False, False, 4),
        ("0.26", 1, True, False, 2),
        ("0.26", 4, True, False, 4),
        ("0.33", 1, True, True, 2),
        ("0.33", 4, True, True, 5),
    ],
)
def test_tokens_in_flight_are_those_of_all_batches_since_0_26(
    version: str, stages: int, asynchronous: bool, second: bool, batches: int
) -> None:
    found = rules(version).tokens_in_flight(
        2048, pipeline_parallel_size=stages, async_scheduling=asynchronous, runner_v2=second
    )
    assert found == batches * 2048


def test_cross_attention_reserved_for_the_models_own_length_once() -> None:
    assert rules("0.11").encoder_tokens(8192, 1500) == 1500
    assert rules("0.11").encoder_tokens(8192, None) == 8192
    assert rules("0.19").encoder_tokens(8192, 1500) == 8192


# Groups


def test_grouping_by_version() -> None:
    assert not rules("0.8.5").group_rules(hybrid_manager=True).hybrid_manager
    old, equal, padding, states, newest = (
        rules(version).group_rules(hybrid_manager=True)
        for version in ("0.11", "0.19", "0.24", "0.26", "0.33")
    )
    assert [r.uneven for r in (old, equal)] == [None, Fraction(3, 2)]
    assert [r.scales_blocks for r in (old, equal)] == [False, True]
    assert [r.divides_widths for r in (old, equal)] == [False, True]
    assert equal.padded_kinds == ()
    assert padding.padded_kinds == (*HEADS, LatentAttention)
    assert states.padded_kinds == (*HEADS, LatentAttention, *STATES)
    assert newest.padded_kinds == (*HEADS, *STATES)
    assert [r.falls_back for r in (states, newest)] == [False, True]
    assert [r.mixed_states for r in (states, newest)] == [True, False]
    assert [r.packing for r in (equal, padding, states, newest)] == ["tuples", "slots", "slots", "widest"]
    assert all(r.hybrid_manager for r in (old, equal, padding, states, newest))
    assert not rules("0.33").group_rules(hybrid_manager=False).hybrid_manager


def test_chunks_keep_all_tokens_before_0_19_and_beside_drafts() -> None:
    assert rules("0.11").chunked_keep_all_tokens(drafts=False)
    assert not rules("0.19").chunked_keep_all_tokens(drafts=False)
    assert rules("0.33").chunked_keep_all_tokens(drafts=True)


# States


@pytest.mark.parametrize(
    ("version", "states", "attention", "caching"),
    [
        ("0.8.5", False, True, True),
        ("0.33", False, True, True),
        ("0.11", True, True, False),
        ("0.24", True, True, False),
        ("0.26", True, True, True),
        ("0.33", True, True, True),
        ("0.33", True, False, False),
    ],
)
def test_prefix_caching_is_on_for_hybrids_since_0_26(
    version: str, states: bool, attention: bool, caching: bool
) -> None:
    assert rules(version).prefix_caching(has_states=states, has_attention=attention) is caching


@pytest.mark.parametrize(
    ("version", "caching", "mamba", "drafts", "mode"),
    [
        ("0.33", False, True, False, "none"),
        ("0.11", True, True, False, "none"),
        ("0.19", True, False, False, "align"),
        ("0.19", True, True, False, "all"),
        ("0.19", True, True, True, "all"),
        ("0.21", True, True, True, "align"),
        ("0.21", True, True, False, "all"),
        ("0.24", True, True, True, "all"),
        ("0.26", True, True, False, "all"),
        ("0.33", True, True, False, "align"),
    ],
)
def test_how_many_states_a_sequence_keeps(
    version: str, caching: bool, mamba: bool, drafts: bool, mode: StateMode
) -> None:
    found = rules(version).state_mode(prefix_caching=caching, all_mamba=mamba, drafts=drafts)
    assert found == mode


@pytest.mark.parametrize(
    ("version", "mode", "blocks"),
    [
        ("0.11", "none", 1),
        ("0.19", "none", 4),
        ("0.19", "align", 5),
        ("0.33", "align", 5),
        ("0.19", "all", 0),
        ("0.21", "all", 0),
        ("0.24", "all", 3),
        ("0.26", "all", 3),
    ],
)
def test_blocks_of_a_state_with_three_drafted_tokens(version: str, mode: StateMode, blocks: int) -> None:
    assert rules(version).state_blocks(mode, 3) == blocks


@pytest.mark.parametrize(
    ("version", "mode", "block_size", "latent", "checkpoint", "multiple"),
    [
        ("0.11", "none", 48, False, 1, 16),
        ("0.11", "none", 48, True, 1, 16),
        ("0.19", "none", 48, False, 1, 16),
        ("0.19", "none", 16, True, 1, 64),
        ("0.21", "none", 48, False, 1, 48),
        ("0.24", "align", 32, True, 1, 32),
        ("0.33", "align", 32, True, 1, 128),
        ("0.33", "align", 16, False, 64, 64),
        ("0.33", "align", 48, False, 64, 192),
        ("0.19", "all", 48, False, 1, 256),
        ("0.26", "all", 16, False, 1, 256),
        ("0.26", "all", 48, False, 1, 768),
    ],
)
def test_what_the_blocks_of_hybrids_are_multiples_of(
    version: str, mode: StateMode, block_size: int, latent: bool, checkpoint: int, multiple: int
) -> None:
    found = rules(version).state_block_multiple(
        mode, block_size, has_latent=latent, chunk_size=256, checkpoint_tokens=checkpoint
    )
    assert found == multiple


@pytest.mark.parametrize(
    ("version", "mode", "kinds", "capability", "found"),
    [
        ("0.26", "align", ["mamba2"], "9.0", ((), 1)),
        ("0.33", "none", ["mamba2"], "9.0", ((), 1)),
        ("0.33", "align", ["mamba2"], "8.0", (("mamba2",), 1)),
        ("0.33", "align", ["gated_delta_net"], "9.0", (("gated_delta_net",), 64)),
        ("0.33", "align", ["gated_delta_net"], None, (("gated_delta_net",), 64)),
        ("0.33", "align", ["gated_delta_net"], "12.0", (("gated_delta_net",), 64)),
        ("0.33", "align", ["gated_delta_net"], "8.9", ((), 1)),
        ("0.33", "align", ["kda"], "9.0", ((), 1)),
        ("0.33", "align", ["mamba2", "short_conv"], "9.0", (("mamba2",), 1)),
        ("0.33", "align", ["mamba2", "gated_delta_net"], "9.0", (("mamba2", "gated_delta_net"), 64)),
        ("0.33", "align", [], "9.0", ((), 1)),
    ],
)
def test_states_that_keep_a_checkpoint(
    version: str,
    mode: StateMode,
    kinds: list[str],
    capability: str | None,
    found: tuple[tuple[str, ...], int],
) -> None:
    assert rules(version).checkpoints(mode, kinds, capability) == found


# Latents


@pytest.mark.parametrize(
    ("version", "capability", "fp8", "size"),
    [
        ("0.8.5", "9.0", False, 64),
        ("0.11", "9.0", False, 64),
        ("0.19", "9.0", False, 16),
        ("0.33", "9.0", True, 64),
        ("0.33", None, False, 16),
        ("0.8.5", "10.0", False, 16),
        ("0.11", "10.0", False, 128),
        ("0.19", "10.0", False, 32),
        ("0.33", "10.3", True, 32),
        ("0.33", "12.0", False, 16),
        ("0.33", "8.0", True, 16),
    ],
)
def test_the_block_of_latents_is_the_kernels(
    version: str, capability: str | None, fp8: bool, size: int
) -> None:
    assert rules(version).latent_block_size(capability, sparse=False, fp8=fp8) == size
    assert rules(version).latent_block_size(capability, sparse=True, fp8=fp8) == 64


def test_v0_7_pads_the_rows_of_latents() -> None:
    assert [rules(version).latent_row_multiple for version in ("0.6", "0.7", "0.8")] == [1, 128, 1]


@pytest.mark.parametrize(
    ("version", "dtype", "capability", "form"),
    [
        ("0.11", "auto", "9.0", "fp8_ds_mla"),
        ("0.11", "fp8_e5m2", "8.0", "fp8_ds_mla"),
        ("0.11", "bfloat16", "9.0", "bfloat16"),
        ("0.19", "auto", "9.0", "auto"),
        ("0.19", "fp8", "9.0", "fp8_ds_mla"),
        ("0.33", "fp8_e4m3", None, "fp8_ds_mla"),
        ("0.33", "fp8", "10.0", "fp8"),
        ("0.24", "auto", "12.0", "fp8_ds_mla"),
        ("0.21", "auto", "12.0", "auto"),
        ("0.33", "bfloat16", "12.0", "bfloat16"),
    ],
)
def test_the_form_of_sparse_latents(version: str, dtype: str, capability: str | None, form: str) -> None:
    found = rules(version).sparse_latent_dtype(dtype, capability, "DeepseekV32ForCausalLM")
    assert found == form


def test_glm_5_is_fp8_on_blackwell_since_0_33() -> None:
    name = "GlmMoeDsaForCausalLM"
    assert rules("0.33").sparse_latent_dtype("auto", "10.0", name) == "fp8_e4m3"
    assert rules("0.33").sparse_latent_dtype("auto", "9.0", name) == "auto"
    assert rules("0.26").sparse_latent_dtype("auto", "10.0", name) == "auto"


@pytest.mark.parametrize(
    ("dtype", "before", "since"),
    [
        ("bfloat16", "0.8", "0.11"),
        ("float16", "0.11", "0.19"),
        ("fp8_ds_mla", "0.11", "0.19"),
        ("nvfp4", "0.19", "0.21"),
        ("int4_per_token_head", "0.24", "0.26"),
        ("nvfp4_ds_mla", "0.26", "0.33"),
    ],
)
def test_forms_of_the_cache_came_one_after_the_other(dtype: str, before: str, since: str) -> None:
    assert not rules(before).takes_kv_dtype(dtype)
    assert rules(since).takes_kv_dtype(dtype)
    assert rules("0.8").takes_kv_dtype("fp8")
