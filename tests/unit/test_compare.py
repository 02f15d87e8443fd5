"""Comparisons: which runs are made, that the bytes stay, the marks and the word that says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvplan.errors import InputError
from kvplan.jobs.compare import CompareResult, combinations, compare, parse_case, parse_vary
from kvplan.jobs.simulate import simulate

LINE = '{"id": "%s", "arrival_s": %s, "input_tokens": %d, "output_tokens": %d}\n'


SMALL: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_model_len": 128, "step_time": 0.01, "jobs": 1}


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Forty requests of some 60 tokens that come at once."""
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(LINE % (f"r{i}", 0, 20 + i % 7, 30 + i % 11) for i in range(40)))
    return str(path)


def words(result: CompareResult) -> list[str]:
    return [run.differs_by for run in result.runs]


def test_every_combination_is_run_and_then_each_case() -> None:
    varied: dict[str, list[object]] = {"engine": ["vllm", "static"], "block_size": [8, 16]}
    assert combinations(varied, [{"max_num_seqs": 4}]) == [
        {"engine": "vllm", "block_size": 8},
        {"engine": "vllm", "block_size": 16},
        {"engine": "static", "block_size": 8},
        {"engine": "static", "block_size": 16},
        {"max_num_seqs": 4},
    ]


def test_flags_are_read_as_on_the_command_line() -> None:
    assert parse_vary("block-size=4,16,2k") == ("block_size", [4, 16, 2000])
    assert parse_vary("--enable-prefix-caching=true,false") == ("enable_prefix_caching", [True, False])
    assert parse_vary("gpu-memory-utilization=0.8,0.9") == ("gpu_memory_utilization", [0.8, 0.9])
    assert parse_case("max-num-seqs=4 gpu=l4 --max-model-len=auto") == {
        "max_num_seqs": 4,
        "gpu": "l4",
        "max_model_len": "auto",
    }


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("block-size", "names no values"),
        ("block-size=", "names no values"),
        ("blok-size=4", 'unknown flag "--blok-size"'),
        ("block-size=4,x", '"x" is not a whole number'),
        ("enable-prefix-caching=yes", '"yes" is neither true nor false'),
        ("gpu-memory-utilization=much", '"much" is not a number'),
    ],
)
def test_what_cannot_be_varied_is_refused(text: str, what: str) -> None:
    with pytest.raises(InputError, match=what):
        parse_vary(text)


@pytest.mark.parametrize(
    ("text", "what"), [("", "the case is empty"), ('gpu="l4', "cannot be read"), ("a", "no values")]
)
def test_a_case_that_says_nothing_is_refused(text: str, what: str) -> None:
    with pytest.raises(InputError, match=what):
        parse_case(text)


def test_what_all_cases_share_may_be_idle_in_some(trace: str) -> None:
    cases = [{"request_rate": 4.0}, {"concurrency": 4}]
    result = compare(trace, cases=cases, seed=3, **SMALL)
    assert [run.result is not None for run in result.runs] == [True, True]
    with pytest.raises(InputError, match="--seed has no effect"):
        compare(trace, cases=[{"request_rate": 4.0}, {"concurrency": 4, "seed": 3}], **SMALL)


def test_there_must_be_something_to_compare_and_not_too_much() -> None:
    with pytest.raises(InputError, match="nothing to compare"):
        combinations({}, [])
    with pytest.raises(InputError, match="more than 1,000 runs"):
        combinations({"block_size": list(range(40)), "max_num_seqs": list(range(40))}, [])
    with pytest.raises(InputError, match='unknown option "blocksize"'):
        compare("chat", vary={"blocksize": [4]})
    with pytest.raises(InputError, match="cannot be read several times"):
        compare("-", vary={"block_size": [4]})


def test_a_run_is_what_simulate_gives(trace: str) -> None:
    result = compare(trace, vary={"block_size": [8, 16]}, gpu="l40s", jobs=1)
    alone = simulate(trace, block_size=8, gpu="l40s")
    found = result.runs[0].result
    assert found is not None
    assert found.to_dict() == alone.to_dict()


def test_processes_give_what_one_process_gives(trace: str) -> None:
    both = [
        compare(trace, engines=["vllm", "orca-max"], vary={"block_size": [8, 16]}, gpu="l40s", jobs=jobs)
        for jobs in (1, 3)
    ]
    assert both[0].to_dict() == both[1].to_dict()


def test_varying_the_block_size_holds_the_bytes_of_the_pool(trace: str) -> None:
    result = compare(
        trace, vary={"block_size": [4, 16, 64]}, num_gpu_blocks_override=100, block_size=16, jobs=1
    )
    pools = [run.result.kv for run in result.runs if run.result is not None]
    assert [(pool.num_gpu_blocks, pool.block_size) for pool in pools] == [(400, 4), (100, 16), (25, 64)]
    # A number of blocks in the same case is meant as it stands.
    (run,) = compare(
        trace, cases=[{"block_size": 4, "num_gpu_blocks_override": 50}], num_gpu_blocks_override=100, jobs=1
    ).runs
    assert run.result is not None
    assert run.result.kv.num_gpu_blocks == 50


def test_every_engine_has_the_same_slots_where_blocks_are_given(trace: str) -> None:
    engines = ["vllm", "paged", "static", "orca-max", "orca-pow2", "orca-oracle"]
    result = compare(trace, engines=engines, **SMALL)
    pools = [run.result.kv for run in result.runs if run.result is not None]
    assert [pool.num_gpu_blocks * pool.block_size for pool in pools] == [1024] * 6


def test_the_best_of_a_column_is_marked_and_the_others_say_why_they_differ(trace: str) -> None:
    result = compare(trace, engines=["vllm", "static", "orca-max"], **SMALL)
    vllm, static, orca = result.runs
    assert words(result)[0] == "fastest"
    assert words(result)[1].startswith("waits: ")
    assert words(result)[2].endswith("% waste")
    assert "latency.e2e_s.mean" in vllm.best
    assert "kv.token_share" in vllm.best
    assert "kv.token_share" not in static.best
    assert "kv.external_fragmentation" not in orca.best, "all are 0: nobody leads"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"max_num_seqs": 4}, "waits: seats"),
        ({"num_gpu_blocks_override": 40}, "waits: 12 % reserved"),
        ({"step_time": 0.02}, "slower steps"),
        ({"max_num_seqs": 200}, "as fast"),
        ({"max_model_len": 26}, "5 fewer finished"),
    ],
)
def test_a_word_names_the_largest_part_of_the_difference(
    trace: str, changes: dict[str, object], word: str
) -> None:
    result = compare(trace, cases=[{}, changes], num_gpu_blocks_override=1000, step_time=0.01, jobs=1)
    assert words(result) == ["fastest", word]


def test_samples_are_no_requests_that_others_lack(tmp_path: Path) -> None:
    # One request is rejected: to the paged engine that is 1 of 9, to vllm, which takes samples as requests, 3 of 27.
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(LINE % (f"r{i}", i, 500 if i == 4 else 20, 30) for i in range(9)))
    result = compare(str(path), engines=["vllm", "paged", "static"], n=3, **SMALL)
    finished = [run.result.requests.finished for run in result.runs if run.result is not None]
    assert finished == [24, 8, 24]
    assert {run.result.finished_share for run in result.runs if run.result is not None} == {8 / 9}
    assert not any("fewer finished" in word for word in words(result))


def test_preemptions_are_named_where_they_cost_the_most(tmp_path: Path) -> None:
    # Two at a time with room for less than two whole sequences; nobody else waits.
    path = tmp_path / "two.jsonl"
    path.write_text("".join(LINE % (f"r{i}", 30 * i // 2, 16, 400) for i in range(6)))
    result = compare(
        str(path),
        vary={"num_gpu_blocks_override": [200, 28]},
        max_model_len=420,
        step_time=0.05,
        enable_prefix_caching=False,
        jobs=1,
    )
    assert words(result)[0] == "fastest"
    assert words(result)[1].startswith("preempts: ")


def test_an_engine_that_does_not_start_is_a_row_with_its_reason(trace: str) -> None:
    result = compare(trace, vary={"max_model_len": [64, 4096]}, num_gpu_blocks_override=100, jobs=1)
    assert [run.result is None for run in result.runs] == [False, True]
    assert words(result)[1] == "does not start"
    assert not result.is_done
    runs = result.to_dict()["runs"]
    assert isinstance(runs, list)
    assert "would not start" in runs[1]["error"]["message"]


def test_a_flag_that_an_engine_does_not_have_is_an_error_before_anything_runs(trace: str) -> None:
    with pytest.raises(InputError, match="--enable-prefix-caching is no setting of engine orca-max"):
        compare(trace, engines=["vllm", "orca-max"], enable_prefix_caching=True, gpu="l40s")
    off = compare(
        trace,
        engines=["vllm", "orca-max"],
        enable_prefix_caching=False,
        gpu="l40s",
        max_model_len=4096,
        jobs=1,
    )
    assert off.is_done


def test_a_wrong_line_of_the_trace_is_the_error_of_a_process_too(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(LINE % ("a", 0, 10, 5) + "nonsense\n")
    with pytest.raises(InputError, match="JSON") as error:
        compare(str(path), vary={"block_size": [8, 16]}, gpu="l40s", jobs=2)
    assert error.value.where is not None
    assert error.value.where.endswith("bad.jsonl:2")
