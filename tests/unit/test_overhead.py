"""Memory that the engine measures when it starts: sums worked by hand, version by version."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from kvplan.config import load_model
from kvplan.core.model import ModelSpec
from kvplan.core.overhead import Overhead, estimate_overhead, num_capture_sizes
from kvplan.errors import InputError

GIB = 1 << 30
MIB = 1 << 20


def estimate(model: str = "llama-2-7b", **changes: object) -> Overhead:
    """2048 tokens and 256 sequences on an H100, unless said."""
    settings: dict[str, Any] = {"max_num_batched_tokens": 2048, "max_num_seqs": 256, "version": "0.19"}
    return estimate_overhead(load_model(model), **(settings | changes))


def test_the_forward_pass_keeps_the_mlp_and_four_copies_of_the_hidden_states() -> None:
    # 2048 tokens x 2 bytes x (4 x 4096 + 3 x 11,008) = 202,375,168, more than the sampler below; cuBLAS 32 MiB.
    assert estimate().activations == 202_375_168 + 32 * MIB


def test_ranks_share_the_mlp_but_not_the_hidden_states() -> None:
    # 4096 x (4 x 4096 + 3 x 11,008 / 2) = 134,742,016 is now less than the sampler's peak: 256 x 32,000 entries of
    # 2 + 12 bytes, 132 rows of the kernel's buffer and hidden states of 2048 + 2 x 256 tokens.
    sampling = 8_192_000 * 14 + 132 * 32_000 * 4 + (2048 + 512) * 8192
    assert sampling == 152_555_520
    assert estimate(tensor_parallel_size=2).activations == sampling + 32 * MIB


@pytest.mark.parametrize(
    ("version", "tenths"),
    [
        ("0.8.5", 382),  # sorting
        ("0.16.0", 382),
        ("0.21.0", 140),  # FlashInfer
        ("0.26.0", 20),  # the second runner, for a dense model: logits alone
    ],
)
def test_the_sampler_of_each_version_holds_so_many_tenths_of_a_byte_an_entry(
    version: str, tenths: int
) -> None:
    # Qwen3-14B: 151,936 entries, 5120 hidden. 1024 sequences, and tokens no more than that: the sampler decides.
    found = estimate("qwen3-14b", version=version, max_num_seqs=1024, max_num_batched_tokens=1024)
    hidden = 3 * 1024 * 5120 * 2
    forward = 1024 * 2 * (4 * 5120 + 3 * 17_408)
    assert found.activations == 32 * MIB + max(hidden + 1024 * 151_936 * tenths // 10, forward)


def test_few_sequences_are_sorted_where_many_take_the_kernel() -> None:
    model = "gemma-7b"  # 256,000 entries: 7 rows are sorted, with 38.2 bytes each; 8 are not
    seven = estimate(model, max_num_seqs=7, max_num_batched_tokens=7)
    eight = estimate(model, max_num_seqs=8, max_num_batched_tokens=8)
    assert seven.activations - 32 * MIB == 7 * 3 * 3072 * 2 + 7 * 256_000 * 382 // 10
    assert eight.activations - 32 * MIB == 8 * 3 * 3072 * 2 + 8 * 256_000 * 14 + 8 * 256_000 * 4


def test_workspaces_of_experts_stay_until_the_sampler_runs() -> None:
    # Qwen3-30B-A3B: 8 experts a token, 768 wide, hidden 2048. 8192 x 8 x (max(768, 2048) + max(1536, 2048)) x 2 bytes.
    # The sampler: 1024 x 151,936 entries; 132 rows; hidden states of 8192 + 2 x 1024 tokens.
    found = estimate("qwen3-30b-a3b", max_num_batched_tokens=8192, max_num_seqs=1024)
    workspace = 8192 * 8 * 4096 * 2
    sampler = 1024 * 151_936 * 14 + 132 * 151_936 * 4 + (8192 + 2048) * 4096
    assert found.activations == 32 * MIB + workspace + sampler
    assert round(found.activations / GIB, 2) == 2.67  # the log says 2.68


def test_experts_in_four_bits_keep_no_workspace() -> None:
    found = estimate("gpt-oss-20b", max_num_batched_tokens=8192, max_num_seqs=1024)
    assert round(found.activations / GIB, 2) == 2.87  # as the log says


def test_inputs_other_than_text_are_kept_with_their_pixels() -> None:
    # 2048 tokens: 2048 x 2560 x 2 bytes of embeddings, 2048 x 784 x 3 x 2 of pixels.
    text, images = (estimate("gemma-3-4b", multimodal=m).activations for m in (False, True))
    assert images - text == 2048 * 2560 * 2 + 2048 * 784 * 6


def test_graphs_are_counted_by_size_and_layer_and_subtracted_since_0_21() -> None:
    # 51 sizes to 512 in pieces and 35 to 256 whole, 140 KiB for each of 32 layers, and a quarter GiB.
    graphs = GIB // 4 + (51 + 35) * 32 * 140 * 1024
    assert graphs == 662_962_176
    old, new = estimate(version="0.20.2"), estimate(version="0.21.0")
    assert (old.cuda_graphs, old.uncounted_graphs) == (0, graphs)
    assert (new.cuda_graphs, new.uncounted_graphs) == (graphs, 0)
    # The second runner estimated nothing for a while.
    assert (estimate(version="0.26").cuda_graphs, estimate(version="0.33").cuda_graphs) == (0, graphs)
    eager = estimate(version="0.33", enforce_eager=True)
    assert (eager.cuda_graphs, eager.uncounted_graphs) == (0, 0)


@pytest.mark.parametrize(
    ("largest", "sizes"), [(1, 1), (2, 2), (4, 3), (16, 5), (248, 34), (256, 35), (512, 51)]
)
def test_the_captured_sizes_are_the_engines(largest: int, sizes: int) -> None:
    # 5 (largest 16), 35 (256) and 51 (512) as start-up logs print them.
    assert num_capture_sizes(largest) == sizes


def test_the_second_runner_keeps_counts_of_tokens_for_penalties() -> None:
    # 256 x (4 x 32,000 + 4 x 1000) bytes, since what is gone from free memory counts.
    difference = estimate(version="0.27").activations - estimate(version="0.26").activations
    assert difference == 256 * 132_000


def test_ranks_on_hopper_share_buffers_that_older_gpus_do_not_make() -> None:
    context = 25 * GIB // 100
    assert estimate().runtime == context
    assert estimate(tensor_parallel_size=2).communication == 41 * GIB // 100 + 145 * GIB // 100
    a100 = estimate(tensor_parallel_size=2, compute_capability="8.0")
    assert (a100.communication, a100.runtime) == (41 * GIB // 100, 41 * GIB // 100 + 13 * GIB // 100)
    stages = estimate(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert stages.communication == 41 * GIB // 100 + GIB // 5
    assert estimate(version="0.11").runtime == 13 * GIB // 100


@pytest.mark.parametrize("version", ["", "latest", "19", "0.x", "9" * 5000, "0." + "9" * 50])
def test_a_version_that_is_none_is_refused(version: str) -> None:
    with pytest.raises(InputError, match="is not a version"):
        estimate(version=version)


def test_activations_are_those_that_vllm_0_19_printed(shared: Path) -> None:
    """Every row of a known text model, within 0.05 GiB: nothing in this figure is fitted."""
    path = shared / "measured" / "kv_capacity.csv"
    if not path.exists():
        pytest.skip(f"no file {path}")
    compared = 0
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            spec = known(row["model"])
            if (
                not row["engine_version"].startswith("0.19")
                or not row["torch_peak_increase_gib"]
                or spec is None
            ):
                continue
            found = estimate_overhead(
                spec,
                version=row["engine_version"],
                max_num_batched_tokens=8192,
                max_num_seqs=1024,
                tensor_parallel_size=int(row["tp"]),
                multimodal=False,
            )
            if not spec.architecture.endswith("ForConditionalGeneration"):
                compared += 1
                assert abs(found.activations / GIB - float(row["torch_peak_increase_gib"])) < 0.05, row[
                    "run_id"
                ]
    assert compared >= 15


def known(name: str) -> ModelSpec | None:
    try:
        return load_model(name)
    except InputError:
        return None
