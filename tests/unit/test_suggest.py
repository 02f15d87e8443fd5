"""Changes that would make a deployment fit: each is what `size` says with its flags, the least step of its kind."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from kvplan.jobs.size import SizeResult, size, size_on
from kvplan.options import SizeOptions

UNFIT: list[dict[str, Any]] = [
    {"model": "llama-2-13b", "gpu": "l4", "seq": 4096},
    {"model": "llama-2-13b", "gpu": "a100-80gb", "seq": 4096, "concurrency": 20},
    {"model": "llama-3.1-8b", "gpu": "l4"},
    {"model": "llama-3.1-8b", "gpu": "l4", "seq": 8192, "concurrency": 40},
    {"model": "llama-3.1-70b", "gpu": "2xh100-80gb"},
    {"model": "llama-3.1-70b", "gpu": "h100-80gb", "tensor_parallel_size": 1},
    {"model": "llama-3.1-8b", "gpu": "h100-80gb", "seq": 2048, "concurrency": 2000},
    {"model": "gemma-3-27b", "gpu": "a100-80gb", "concurrency": 6},
    {"model": "llama-3.1-8b", "kv_cache_memory_bytes": "8GiB"},
    {"model": "llama-3.1-8b", "gpu_memory": "24GiB", "gpu_memory_utilization": 0.7, "seq": 100},
    {"model": "llama-3.1-405b", "gpu": "l4"},
]


def planned(given: dict[str, Any], flags: dict[str, Any] | None = None) -> SizeResult:
    options = {**given, **(flags or {})}
    return size(options.pop("model"), **options)


def suggestions(given: dict[str, Any]) -> list[dict[str, Any]]:
    capacity = planned(given).capacity
    assert capacity is not None
    return [asdict(item) for item in capacity.suggestions]


def named(case: dict[str, Any]) -> str:
    return " ".join(str(value) for value in case.values())


@pytest.mark.parametrize("given", UNFIT, ids=named)
def test_each_change_fits_and_has_the_effect_that_size_gives_with_its_flags(given: dict[str, Any]) -> None:
    found = suggestions(given)
    assert found
    for suggestion in found:
        capacity = planned(given, suggestion["flags"]).capacity
        assert capacity is not None
        assert capacity.fits, suggestion
        for name in ("fits", "fits_confidence", "concurrent_sequences", "max_model_len_that_fits"):
            assert suggestion[name] == getattr(capacity, name), suggestion
        assert suggestion["effect"].startswith("fits")
        assert f"{capacity.concurrent_sequences:,} sequence" in suggestion["effect"]


@pytest.mark.parametrize("given", UNFIT, ids=named)
def test_the_words_of_a_change_are_its_flags(given: dict[str, Any]) -> None:
    for suggestion in suggestions(given):
        words = []
        for name, value in suggestion["flags"].items():
            words.append("--" + name.replace("_", "-"))
            words += [] if value is True else [str(value)]
        assert suggestion["change"] == " ".join(words)


@pytest.mark.parametrize("given", UNFIT, ids=named)
def test_no_smaller_step_of_a_length_a_count_or_a_share_would_do(given: dict[str, Any]) -> None:
    for suggestion in suggestions(given):
        flags = suggestion["flags"]
        if set(flags) == {"gpu_memory_utilization"}:
            less = {"gpu_memory_utilization": round(flags["gpu_memory_utilization"] - 0.01, 2)}
        elif set(flags) == {"concurrency"}:
            less = {"concurrency": flags["concurrency"] + 1}
        elif set(flags) <= {"max_model_len", "seq"}:
            less = {name: value + 1 for name, value in flags.items()}
        elif set(flags) == {"pipeline_parallel_size"} and flags["pipeline_parallel_size"] > 2:
            less = {"pipeline_parallel_size": flags["pipeline_parallel_size"] - 1}
        elif set(flags) == {"max_num_batched_tokens"}:
            less = {"max_num_batched_tokens": flags["max_num_batched_tokens"] * 2}
        else:
            continue
        result = planned(given, less)
        assert result.capacity is not None
        assert not result.capacity.fits, suggestion


def test_the_smallest_larger_gpu_is_named() -> None:
    (change,) = [s for s in suggestions(UNFIT[0]) if "gpu" in s["flags"]]
    ranked = size_on("llama-2-13b", "all", SizeOptions(seq=4096))
    alone = [
        r.gpu for r in ranked if r.gpu is not None and r.gpu.count == 1 and r.capacity and r.capacity.fits
    ]
    assert change["flags"]["gpu"] == min(alone, key=lambda gpu: gpu.memory_bytes).name


def test_a_number_of_gpus_goes_up_with_the_ranks() -> None:
    flags = [s["flags"] for s in suggestions(UNFIT[4])]
    assert {"gpu": "4xh100-80gb"} in flags
    assert {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "gpu": "4xh100-80gb"} in flags


def test_fp8_is_for_gpus_that_have_it() -> None:
    def wins(gpu: str) -> bool:
        return any(
            "kv_cache_dtype" in s["flags"]
            for s in suggestions({"model": "llama-3.1-8b", "gpu": gpu, "suggest": True})
        )

    assert wins("h100-80gb")
    assert wins("l40s")
    assert not wins("a100-80gb")


def test_without_a_named_length_a_shorter_one_comes_first_with_one_it_comes_after_settings() -> None:
    assert suggestions(UNFIT[2])[0]["flags"].keys() == {"max_model_len"}
    given = {"model": "llama-3.1-8b", "gpu": "h100-80gb", "seq": 4096, "concurrency": 112}
    names = [tuple(s["flags"]) for s in suggestions(given)]
    assert names.index(("gpu_memory_utilization",)) < names.index(("max_model_len", "seq"))
    assert (
        names.index(("max_model_len", "seq"))
        < names.index(("concurrency",))
        < names.index(("tensor_parallel_size",))
    )


def test_two_changes_are_offered_where_none_alone_does() -> None:
    changes = suggestions(UNFIT[10])
    assert changes
    assert all(len(s["flags"]) == 2 for s in changes)
    for suggestion in changes:
        for name, value in suggestion["flags"].items():
            if name != "gpu":
                result = planned(UNFIT[10], {name: value})
                assert result.capacity is not None
                assert not result.capacity.fits


def test_a_given_pool_is_not_widened_by_settings_of_the_budget() -> None:
    given = UNFIT[8]
    names = {name for s in suggestions(given) for name in s["flags"]}
    assert names == {"max_model_len", "tensor_parallel_size", "pipeline_parallel_size"}


def test_what_fits_is_left_alone_unless_asked() -> None:
    assert suggestions({"model": "llama-3.1-8b", "gpu": "h100-80gb"}) == []


def test_asked_for_each_change_lets_more_in() -> None:
    given = {"model": "llama-3.1-8b", "gpu": "h100-80gb", "seq": 4096}
    before = planned(given).capacity
    assert before is not None
    found = suggestions({**given, "suggest": True})
    assert {"kv_cache_dtype", "enforce_eager", "gpu_memory_utilization", "gpu"} <= {
        n for s in found for n in s["flags"]
    }
    for suggestion in found:
        after = planned(given, suggestion["flags"]).capacity
        assert after is not None
        assert after.fits
        assert after.concurrent_sequences == suggestion["concurrent_sequences"] > before.concurrent_sequences


# How many GPUs a model needs


def test_each_gpu_is_taken_as_often_as_needed_and_no_more() -> None:
    results = size_on("llama-3.1-70b", "l4,v100-32gb,h100,h200,mi300x,b300", SizeOptions(seq=8192))
    for result in results:
        assert result.capacity is not None
        assert result.gpu is not None
        assert result.capacity.fits
        count = result.gpu.count
        degrees = [result.config[f"{name}_parallel_size"].value for name in ("tensor", "pipeline")]
        assert [count] == [a * b for a, b in [degrees] if isinstance(a, int) and isinstance(b, int)]
        if 1 < count <= 8:
            for fewer in (1, 2, 4):
                if fewer < count:
                    less = size("llama-3.1-70b", seq=8192, gpu=f"{fewer}x{result.gpu.name}").capacity
                    assert less is not None
                    assert not less.fits, result.gpu.name
    keys = [(r.gpu.count, r.gpu.count * r.gpu.memory_bytes) for r in results if r.gpu is not None]
    assert keys == sorted(keys)


def test_a_number_of_gpus_and_degrees_of_parallelism_are_kept() -> None:
    counts = [r.gpu.count for r in size_on("llama-3.1-8b", "8xl4,h200", SizeOptions(seq=4096)) if r.gpu]
    assert counts == [1, 8]
    (first, _) = size_on("llama-3.1-8b", "h100,h200", SizeOptions(seq=4096, tensor_parallel_size=2))
    assert first.gpu is not None
    assert first.gpu.count == 2


def test_gpus_of_unknown_memory_are_left_out_with_a_note() -> None:
    from kvplan.config import list_gpus
    from kvplan.errors import InputError

    unknown = next(gpu.name for gpu in list_gpus() if gpu.memory_bytes is None)
    (only,) = size_on("llama-3.1-8b", f"h100,{unknown}", SizeOptions(seq=4096))
    assert any(unknown in warning for warning in only.warnings)
    with pytest.raises(InputError, match="memory of"):
        size_on("llama-3.1-8b", f"{unknown},{unknown}", SizeOptions(seq=4096))


def test_what_never_fits_comes_last() -> None:
    results = size_on("llama-3.1-405b", "t4,h200", SizeOptions())
    assert [r.gpu.name for r in results if r.gpu] == ["h200", "t4"]
    assert results[1].capacity is not None
    assert not results[1].capacity.fits
