"""Options by name: what is accepted, refused, resolved, and where a value is said to come from."""

from __future__ import annotations

import math

import pytest

from kvplan.core.engines.contiguous import RESERVATIONS
from kvplan.errors import InputError
from kvplan.jobs.size import size
from kvplan.options import (
    CONTIGUOUS_ENGINES,
    Resolver,
    ServingOptions,
    SimulateOptions,
    SizeOptions,
    check_options,
    flag,
    parse_engine,
    settings_dict,
    size_in_bytes,
)


def refused(options: ServingOptions) -> InputError:
    with pytest.raises(InputError) as error:
        check_options(options)
    return error.value


# Names and kinds


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match='unknown option "block_sise"') as error:
        SizeOptions.of({"block_sise": 16})
    assert error.value.hint is not None
    assert "block_size" in error.value.hint


def test_an_option_of_another_job_is_unknown() -> None:
    with pytest.raises(InputError, match='unknown option "seq"'):
        SimulateOptions.of({"seq": 1})


def test_none_leaves_the_default() -> None:
    assert SimulateOptions.of({"format": None, "limit": None}) == SimulateOptions()


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("block_size", "16", "a whole number"),
        ("block_size", 16.0, "a whole number"),
        ("block_size", True, "a whole number"),
        ("gpu_memory_utilization", "0.9", "a number"),
        ("gpu_memory_utilization", True, "a number"),
        ("enforce_eager", 1, "true or false"),
        ("dtype", 16, "a text"),
        ("set", "a=1", "a list of texts"),
        ("set", ["a=1", 2], "a list of texts"),
        ("gpu_memory", 1.5, "a text or a whole number"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_its_flag(name: str, value: object, wanted: str) -> None:
    with pytest.raises(InputError, match=f"not {wanted}") as error:
        ServingOptions.of({name: value})
    assert error.value.where == flag(name)
    assert error.value.hint == f"write {wanted}"


def test_a_whole_number_will_do_for_a_number_and_a_list_for_several_texts() -> None:
    options = ServingOptions.of({"gpu_memory_utilization": 1, "set": ["a=1", "b=2"]})
    assert options.gpu_memory_utilization == 1.0
    assert isinstance(options.gpu_memory_utilization, float)
    assert options.set == ("a=1", "b=2")


def test_lengths_may_be_a_number_or_auto() -> None:
    assert ServingOptions.of({"max_model_len": "auto"}).max_model_len == "auto"
    assert ServingOptions.of({"max_model_len": 9}).max_model_len == 9


def test_the_flag_of_an_option_has_dashes() -> None:
    assert flag("max_num_batched_tokens") == "--max-num-batched-tokens"


# Values


@pytest.mark.parametrize(
    "name",
    [
        "seq",
        "concurrency",
        "tensor_parallel_size",
        "block_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_model_len",
    ],
)
@pytest.mark.parametrize("value", [0, -1, 10**10 + 1])
def test_counts_are_from_one_to_ten_billion(name: str, value: int) -> None:
    assert refused(SizeOptions.of({name: value})).where == flag(name)
    check_options(SizeOptions.of({name: 1}))
    check_options(SizeOptions.of({name: 10**10}))


@pytest.mark.parametrize("value", [0, -1, 10**8 + 1])
def test_blocks_are_from_one_to_a_hundred_million(value: int) -> None:
    assert refused(SizeOptions.of({"num_gpu_blocks_override": value})).where == "--num-gpu-blocks-override"
    check_options(SizeOptions.of({"num_gpu_blocks_override": 10**8}))


@pytest.mark.parametrize("value", [True, "many", 1.5])
def test_a_count_that_is_set_past_the_checks_is_still_no_other_kind(value: object) -> None:
    options = SizeOptions()
    options.max_model_len = value  # type: ignore[assignment]
    assert refused(options).what == f'"{value}" is not a whole number'


@pytest.mark.parametrize("name", ["step_time", "rate_scale", "slo_ttft", "slo_tpot", "slo_e2e"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1.1e9])
def test_times_and_rates_are_above_zero_and_finite(name: str, value: float) -> None:
    assert refused(SimulateOptions.of({name: value})).where == flag(name)
    check_options(SimulateOptions.of({name: 0.5}))


@pytest.mark.parametrize("value", [-0.5, math.nan, math.inf])
def test_the_warm_up_is_from_zero_on(value: float) -> None:
    assert refused(SimulateOptions.of({"warmup": value})).where == "--warmup"
    check_options(SimulateOptions.of({"warmup": 0.0}))


@pytest.mark.parametrize("value", [-1, 10**10 + 1])
def test_the_prefill_threshold_is_from_zero_on(value: int) -> None:
    options = SimulateOptions.of({"long_prefill_token_threshold": value})
    assert refused(options).where == "--long-prefill-token-threshold"
    check_options(SimulateOptions.of({"long_prefill_token_threshold": 0}))


@pytest.mark.parametrize("value", [0.0, -0.1, 1.01, math.nan])
def test_the_share_of_memory_is_above_zero_and_up_to_one(value: float) -> None:
    assert refused(ServingOptions.of({"gpu_memory_utilization": value})).where == "--gpu-memory-utilization"
    check_options(ServingOptions.of({"gpu_memory_utilization": 1.0}))


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("margin", "medium", "choose low, mid or high"),
        ("scheduling_policy", "round-robin", "choose fcfs or priority"),
    ],
)
def test_a_choice_is_one_of_those_there_are(name: str, value: str, hint: str) -> None:
    error = refused(SimulateOptions.of({name: value}))
    assert (error.where, error.hint) == (flag(name), hint)


@pytest.mark.parametrize(
    ("text", "engine", "label"),
    [
        (None, ("vllm", "0.33"), "vllm@0.33"),
        ("vllm", ("vllm", "0.33"), "vllm@0.33"),
        ("vllm@0.24.0", ("vllm", "0.24"), "vllm@0.24"),
        (" vllm@0.19 ", ("vllm", "0.19"), "vllm@0.19"),
    ],
)
def test_an_engine_is_a_name_and_the_version_of_its_rules(
    text: str | None, engine: tuple[str, str], label: str
) -> None:
    assert parse_engine(text) == engine
    assert parse_engine(text).label == label


def test_engines_that_reserve_contiguous_memory_are_named_alike_everywhere() -> None:
    assert CONTIGUOUS_ENGINES == RESERVATIONS
    assert all(parse_engine(name) == (name, "") for name in CONTIGUOUS_ENGINES)


def test_another_version_and_an_unknown_engine_are_refused() -> None:
    with pytest.raises(InputError, match=r"rules of vLLM 0\.34 are not known"):
        parse_engine("vllm@0.34")
    with pytest.raises(InputError, match='unknown engine "vlm"') as error:
        parse_engine("vlm")
    assert error.value.hint is not None
    assert "vllm" in error.value.hint


def test_sizes_may_be_texts_or_bytes() -> None:
    assert size_in_bytes(None, "gpu_memory") is None
    assert size_in_bytes(5, "gpu_memory") == 5
    assert size_in_bytes("1KiB", "gpu_memory") == 1024
    with pytest.raises(InputError) as error:
        size_in_bytes(-5, "gpu_memory")
    assert error.value.where == "--gpu-memory"


# Resolving


def test_a_value_that_no_flag_gave_names_its_origin() -> None:
    resolver = Resolver(ServingOptions.of({"block_size": 8}), {"block_size": "checks.yaml"})
    assert resolver.choose("block_size", 16, "default") == 8
    assert resolver.settings["block_size"].source == "checks.yaml"


def test_a_word_is_spelt_out_beside_where_it_came_from() -> None:
    resolver = Resolver(ServingOptions.of({"dtype": "auto"}))
    assert resolver.choose("dtype", "auto", "default") == "auto"
    resolver.spell_out("dtype", "bfloat16", "the model's own")
    assert resolver.settings["dtype"] == ("bfloat16", "the model's own (--dtype)", True)


def test_what_was_given_and_is_no_setting_of_the_engine_is_noted_at_the_end() -> None:
    resolver = Resolver(SimulateOptions.of({"limit": 5, "set": ["a=1"], "format": "auto"}))
    resolver.note_rest()
    assert settings_dict(resolver.settings) == {
        "limit": {"value": 5, "source": "--limit"},
        "set": {"value": ["a=1"], "source": "--set"},
    }


def test_the_python_function_refuses_what_the_command_refuses() -> None:
    with pytest.raises(InputError, match="out of range"):
        size("llama-2-7b", seq=0)
    with pytest.raises(InputError, match='unknown option "sek"'):
        size("llama-2-7b", sek=1)
