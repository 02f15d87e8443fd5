"""A model's cache groups as the scheduler takes them, and runs with them; figures worked by hand from the shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvplan import simulate
from kvplan.core.engine import GroupSpec, SchedulerConfig
from kvplan.errors import DoesNotFit, InputError
from kvplan.jobs.simulate import Simulation
from kvplan.options import SimulateOptions

TRACE = '{"arrival_s":0,"input_tokens":700,"output_tokens":3}\n{"arrival_s":0,"input_tokens":90,"output_tokens":2}\n'


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "two.jsonl"
    path.write_text(TRACE)
    return str(path)


def settings(trace: str, **options: object) -> SchedulerConfig:
    simulation = Simulation(trace, SimulateOptions.of(options))
    simulation.trace.close()
    config = simulation.engine_config
    assert isinstance(config, SchedulerConfig)
    return config


def test_a_model_whose_layers_keep_all_tokens_has_one_group(trace: str) -> None:
    config = settings(trace, model="llama-3.1-8b")
    assert (config.groups, config.slots_a_block) == ((GroupSpec(),), None)


def test_windows_and_full_layers_with_a_padded_group(trace: str) -> None:
    # Gemma-3-4B: 34 layers, every sixth full, 4 heads of 256 in bf16: a layer's page of 16 tokens has 65,536 bytes.
    # 29 windows of 1,024 in six groups of five, of which one has four layers; one group of five full layers.
    config = settings(trace, model="gemma-3-4b", gpu="h100-80gb")
    page = 2 * 16 * 4 * 256 * 2
    assert config.slots_a_block == 5 * page
    payloads = [(spec.kind, spec.window, spec.payload) for spec in config.groups]
    assert payloads.count(("sliding", 1024, 5 * page)) == 5
    assert payloads.count(("sliding", 1024, 4 * page)) == 1
    assert payloads.count(("full", 0, 5 * page)) == 1
    assert {config.block_size_of(spec) for spec in config.groups} == {16}


def test_states_follow_prefix_caching(trace: str) -> None:
    options = {"model": "qwen3-next-80b", "gpu": "4xh100-80gb", "max_model_len": 8192}
    config = settings(trace, **options)
    states = [spec for spec in config.groups if spec.kind == "state"]
    assert [(spec.mode, config.block_size_of(spec)) for spec in states] == [("align", config.block_size)] * 3
    assert states[0].checkpoint == config.block_size  # the kernel runs on Hopper
    off = settings(trace, **options, enable_prefix_caching=False)
    assert [(spec.mode, spec.block_size) for spec in off.groups if spec.kind == "state"] == [
        ("none", 8192)
    ] * 3


def test_chunks_of_llama_4(trace: str) -> None:
    config = settings(trace, model="llama-4-scout", gpu="8xh100-80gb", max_model_len=32768)
    assert {(spec.kind, spec.chunk) for spec in config.groups} == {("full", 0), ("chunked", 8192)}


@pytest.mark.parametrize("model", ["gpt-oss-20b", "gemma-3-4b"])
def test_blocks_of_a_run_add_up(trace: str, model: str) -> None:
    result = simulate(trace, model=model, gpu="h100-80gb")
    kv = result.kv
    assert result.simulation["engine_path"] in ("plain", "fast")
    assert sum(group.blocks_mean or 0 for group in kv.groups) == pytest.approx(
        (kv.utilization.mean or 0) * (kv.num_gpu_blocks - 1)
    )
    shares = (kv.token_share, kv.reserved_share, kv.internal_fragmentation, kv.external_fragmentation)
    assert sum(share or 0 for share in shares) == pytest.approx(1)


def test_stages_drafts_and_a_queue_run_in_the_plain_engine(trace: str) -> None:
    result = simulate(
        trace,
        gpu="2xh100-80gb",
        pipeline_parallel_size=2,
        async_scheduling=True,
        num_speculative_tokens=2,
        speculative_method="ngram",
        acceptance_rate=1.0,
    )
    assert result.simulation["engine_path"] == "plain"
    assert result.simulation["async_scheduling"] is True
    assert result.drafts is not None
    assert result.drafts.rejected == 0
    assert result.config["acceptance_rate"].value == 1.0


def test_aborts_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "aborted.jsonl"
    path.write_text(
        '{"arrival_s":1,"input_tokens":90,"output_tokens":200,"abort_s":1.21}\n' + TRACE.splitlines()[1]
    )
    result = simulate(str(path), num_gpu_blocks_override=100, step_time=0.02, rate_scale=2)
    # It arrives at 0.5 s and waits 0.21 s: ten whole steps of 0.02 s, and goes in the eleventh.
    (gone,) = [record for record in result.records if record.aborted is not None]
    assert (gone.output_tokens, gone.request.arrival, gone.request.abort) == (10, 5 * 10**11, 71 * 10**10)
    assert (result.requests.aborted, result.requests.finished, result.requests.unfinished) == (1, 1, 0)


def test_an_engine_without_aborts_says_so(tmp_path: Path) -> None:
    path = tmp_path / "aborted.jsonl"
    path.write_text('{"arrival_s":1,"input_tokens":9,"output_tokens":2,"abort_s":2}\n')
    with pytest.raises(InputError, match="engine paged with requests that are aborted"):
        simulate(str(path), num_gpu_blocks_override=100, engine="paged")


def test_a_pool_too_small_for_windows_names_the_longest_length_that_fits(trace: str) -> None:
    with pytest.raises(DoesNotFit) as error:
        settings(trace, model="gpt-oss-20b", num_gpu_blocks_override=1001, max_model_len=20000)
    # Full layers take a block for 16 tokens; windows at most ceil((127 + 2 x 8,192) / 16) + 1 blocks or so.
    hint = error.value.hint
    longest = int(hint.split()[3])
    assert (
        settings(
            trace, model="gpt-oss-20b", num_gpu_blocks_override=1001, max_model_len=longest
        ).max_model_len
        == longest
    )
    with pytest.raises(DoesNotFit):
        settings(trace, model="gpt-oss-20b", num_gpu_blocks_override=1001, max_model_len=longest + 1)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"long_prefill_token_threshold": 2}, "is not above"),
        ({"pipeline_parallel_size": 2, "async_scheduling": False}, "drafts with pipeline stages"),
    ],
)
def test_what_does_not_go_with_drafts(trace: str, changes: dict[str, object], what: str) -> None:
    drafts = {"num_speculative_tokens": 3, "speculative_method": "ngram", "acceptance_rate": 0.5}
    with pytest.raises(InputError, match=what):
        settings(trace, num_gpu_blocks_override=100, **drafts, **changes)
