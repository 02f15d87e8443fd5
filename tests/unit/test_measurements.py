"""Measured step times from tables, benchmarks, logs and kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.engine import StepWork
from kvplan.errors import InputError
from kvplan.measurements import log_samples, read_measurements
from kvplan.throughput_log import ThroughputLine

TABLE = "batch_size,context_mean,step_ms,model,gpu,tp,note\n4.0,100.5,12.5,llama-2-7b,h100-80gb,2,x\n"


def written(folder: Path, text: str) -> str:
    path = folder / "data"
    path.write_text(text)
    return str(path)


def test_a_table_gives_a_step_each_row(tmp_path: Path) -> None:
    found = read_measurements(written(tmp_path, TABLE))
    (sample,) = found.samples
    assert sample.work == StepWork(4, 402, [], 4)
    assert (sample.seconds, sample.line) == (0.0125, 2)
    assert sample.deployment == {"model": "llama-2-7b", "gpu": "h100-80gb", "tensor_parallel_size": 2}


def test_a_row_may_compute_a_prompt_beside(tmp_path: Path) -> None:
    text = "batch_size,context_mean,step_ms,prompt_tokens\n2,10,30,512\n"
    (sample,) = read_measurements(written(tmp_path, text)).samples
    assert sample.work == StepWork(2, 20, [(0, 512)], 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_size,step_ms\n1,2\n", "the table lacks the column context_mean"),
        ("batch_size,context_mean,step_ms,batch_size\n1,9,2,8\n", "the table has several columns batch_size"),
        ("batch_size,context_mean,step_ms\n", "the table has no rows"),
        (TABLE.replace("12.5", "soon"), 'step_ms is "soon", not a number from 1e-06 to 1e+07'),
        (TABLE.replace("12.5", "nan"), 'step_ms is "nan", not a number'),
        (TABLE.replace("4.0", "0"), 'batch_size is "0", not a number from 1'),
        (
            TABLE.replace("note", "x" * 200_000),
            "the line is no row of a table: field larger than field limit",
        ),
        (TABLE + '1,2,3,"' + "x" * 200_000, "the line is no row of a table: field larger than field limit"),
        (TABLE.replace("100.5", ""), 'context_mean is "", not a number'),
        ("Call me Ishmael.\n", "the file holds no times that are known"),
        ("{", "the file is no JSON"),
        ("[" * 100_000, "the file is no JSON"),
        ('{"a": 1}', "the JSON is the result of no benchmark that is known"),
        ('{"mean_tpot_ms": 12.0}', "the result has no times of each token"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_measurements(written(tmp_path, text))
    assert message in str(caught.value)
    assert caught.value.hint


def benchmark(**changes: Any) -> str:
    """Two requests: the second is sent at 0.5 s and has its first token at 0.6 s."""
    result = {
        "start_times": [100.0, 100.5],
        "ttfts": [0.1, 0.1],
        "itls": [[0.02] * 60, [0.03] * 10],
        "input_lens": [50, 70],
        "mean_tpot_ms": 21.0,
    }
    return json.dumps({**result, **changes})


def test_gaps_count_while_nobody_computes_a_prompt(tmp_path: Path) -> None:
    samples = read_measurements(written(tmp_path, benchmark())).samples
    alone = [sample for sample in samples if sample.work.decodes == 1]
    both = [sample for sample in samples if sample.work.decodes == 2]
    # Alone: 20 ms with 50 tokens of prompt and what was put out; together gaps of 20 and of 30 ms.
    assert all(sample.seconds == pytest.approx(0.02) for sample in alone)
    assert all(0.0199 < sample.seconds < 0.0301 for sample in both)
    assert min(sample.work.decode_context for sample in alone) >= 51
    # 50 + 70 prompt tokens and from 26 on of output, until the second ends.
    assert all(140 <= sample.work.decode_context <= 175 for sample in both)
    # From 0.5 to 0.6 s a prompt is computed: no sample has the context of these tokens alone.
    assert not any(71 < sample.work.decode_context < 76 for sample in alone)


@pytest.mark.parametrize("ttft", [0.0, None, "soon", 10**400, -1, True])
def test_a_failed_request_is_left_out(tmp_path: Path, ttft: object) -> None:
    text = benchmark(ttfts=[0.1, ttft])
    assert {sample.work.decodes for sample in read_measurements(written(tmp_path, text)).samples} == {1}


@pytest.mark.parametrize(
    "changes",
    [
        {"itls": [[0.02, 10**400], "none"]},
        {"start_times": [10**400, None]},
        {"input_lens": [2.5, 10**30]},
        {"itls": [[0.02, -1], [float("nan")]]},
    ],
)
def test_numbers_that_are_none_are_no_requests(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="no two tokens"):
        read_measurements(written(tmp_path, benchmark(**changes)))


def test_a_benchmark_without_a_calm_moment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no two tokens"):
        read_measurements(written(tmp_path, benchmark(itls=[[], []])))


def kernel(**changes: Any) -> dict[str, Any]:
    one = {
        "kernel": "mma",
        "batch": 32,
        "seq": 4096,
        "valid": True,
        "bytes_moved": 1 << 29,
        "achieved_bytes_per_s": 3.0e12,
        "copy_bytes_per_s": 4.0e12,
    }
    return {**one, **changes}


def test_the_best_valid_kernel_of_each_large_size_counts(tmp_path: Path) -> None:
    results = [
        kernel(kernel="naive", achieved_bytes_per_s=1.0e12),
        kernel(),
        kernel(seq=8192, achieved_bytes_per_s=3.4e12),
        kernel(seq=64, bytes_moved=1 << 20, achieved_bytes_per_s=9.0e9),
        kernel(kernel="wrong", valid=False, achieved_bytes_per_s=9.0e12),
    ]
    text = json.dumps({"device": {"name": "NVIDIA H200"}, "results": results})
    found = read_measurements(written(tmp_path, text))
    assert found.rates == ("NVIDIA H200", 3.2e12, 4.0e12)
    assert found.left_out == {"kernels that move less than 256 MiB": 1}


def test_kernels_that_were_only_compiled_say_nothing(tmp_path: Path) -> None:
    text = json.dumps({"results": [kernel(valid=None, achieved_bytes_per_s=None)]})
    with pytest.raises(InputError, match="no valid kernel"):
        read_measurements(written(tmp_path, text))


def line(number: int, **changes: Any) -> ThroughputLine:
    one = ThroughputLine(number, 10.0 * number, 10.0, 0.0, 1000.0, 20, 0, 0.5, None, None)
    return one._replace(**changes)


def test_a_steady_interval_of_a_log_is_a_step() -> None:
    (sample,), left_out = log_samples((line(1), line(2)), pool_tokens=16_000, block_size=16)
    # 20 sequences get 1,000 tokens a second: 20 ms. Half the pool, less half a block of each.
    assert sample.seconds == pytest.approx(0.02)
    assert sample.work == StepWork(20, 8000 - 160, [], 20)
    assert left_out == {}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt_tokens_per_s": 5.0}, "lines with prompt tokens"),
        ({"kv_usage": None}, "lines without the KV cache's usage"),
        ({"generation_tokens_per_s": 0.0}, "idle lines"),
        ({"running": 40}, "lines in which the batch changed"),
        ({"preemptions": 1}, "lines with preemptions, whose tokens were computed again"),
    ],
)
def test_other_intervals_are_counted(changes: dict[str, Any], reason: str) -> None:
    samples, left_out = log_samples((line(1), line(2, **changes)), 16_000, 16)
    assert (samples, left_out) == ([], {reason: 1})
