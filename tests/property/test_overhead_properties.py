"""What holds for the overhead of any model and settings."""

from __future__ import annotations

from typing import Any

from hypothesis import given as drawn
from hypothesis import strategies as st

from kvplan.config import load_model
from kvplan.core.model import ModelSpec
from kvplan.core.overhead import Overhead, estimate_overhead

SPECS = [
    load_model(name) for name in ("llama-2-7b", "qwen3-14b", "qwen3-30b-a3b", "gpt-oss-20b", "gemma-3-4b")
]
VERSIONS = [f"0.{minor}" for minor in range(8, 34)]

specs = st.sampled_from(SPECS)
versions = st.sampled_from(VERSIONS)
settings = st.fixed_dictionaries(
    {
        "max_num_batched_tokens": st.integers(1, 65536),
        "max_num_seqs": st.integers(1, 2048),
        "tensor_parallel_size": st.sampled_from([1, 2, 4]),
        "pipeline_parallel_size": st.sampled_from([1, 2]),
        "enforce_eager": st.booleans(),
        "compute_capability": st.sampled_from(["7.5", "8.0", "8.9", "9.0", "10.0", "12.0", None]),
        "num_sms": st.sampled_from([40, 132, 188, None]),
    }
)


def total(found: Overhead) -> int:
    return found.activations + found.cuda_graphs + found.runtime


@drawn(specs, versions, settings)
def test_the_middle_lies_in_the_range_and_every_part_is_a_whole_number(
    spec: ModelSpec, version: str, given: dict[str, Any]
) -> None:
    found = estimate_overhead(spec, version=version, **given)
    parts = (found.activations, found.cuda_graphs, found.runtime, found.communication, found.uncounted_graphs)
    assert all(isinstance(part, int) and part >= 0 for part in (*parts, found.low, found.high))
    assert found.low <= total(found) == found.total("mid") <= found.high
    assert found.communication <= found.runtime
    if given["enforce_eager"]:
        assert found.cuda_graphs == found.uncounted_graphs == 0


@drawn(specs, versions, settings, st.integers(0, 10_000))
def test_more_tokens_never_take_less(spec: ModelSpec, version: str, given: dict[str, Any], more: int) -> None:
    fewer = estimate_overhead(spec, version=version, **given)
    given = {**given, "max_num_batched_tokens": given["max_num_batched_tokens"] + more}
    # Up to 7 rows the sampler sorts, which takes more than the kernel that serves 8.
    if given["max_num_seqs"] >= 8 and given["max_num_batched_tokens"] - more >= 8:
        assert total(fewer) <= total(estimate_overhead(spec, version=version, **given))


@drawn(specs, versions, settings, st.integers(0, 1000))
def test_more_sequences_never_take_less(
    spec: ModelSpec, version: str, given: dict[str, Any], more: int
) -> None:
    fewer = estimate_overhead(spec, version=version, **given)
    if given["max_num_seqs"] >= 8 and given["max_num_batched_tokens"] >= 8:
        given = {**given, "max_num_seqs": given["max_num_seqs"] + more}
        assert total(fewer) <= total(estimate_overhead(spec, version=version, **given))
