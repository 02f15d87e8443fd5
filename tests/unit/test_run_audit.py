"""A log of traffic beside a simulated run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvplan.core.course import Course
from kvplan.core.request import PICOSECONDS
from kvplan.errors import InputError
from kvplan.jobs.run_audit import run_audit
from kvplan.jobs.simulate import Simulation
from kvplan.options import SimulateOptions

OPTIONS = SimulateOptions(model="llama-2-7b", gpu="h100-80gb", max_model_len=2048)
#: The log's first line comes so many seconds after the first arrival.
LATE = 4.0


def trace(folder: Path) -> str:
    """Forty requests, one a second."""
    path = folder / "trace.jsonl"
    line = {"input_tokens": 300, "output_tokens": 600}
    path.write_text("".join(json.dumps({"arrival_s": second, **line}) + "\n" for second in range(40)))
    return str(path)


def log_of_our_own(folder: Path, source: str, head: str = "") -> str:
    """What vLLM would have logged of the simulated run, every ten seconds."""
    simulation = Simulation(source, OPTIONS)
    course = Course(simulation.usable_blocks)
    simulation.run(turns=[course])
    lines = []
    for number in range(5):
        now = round((LATE + 10 * number) * PICOSECONDS)
        state, before = course.at(now), course.at(now - 10 * PICOSECONDS)
        usage = 100 * state.used_blocks / simulation.usable_blocks
        lines.append(
            f"INFO 12-01 10:00:{4 + 10 * number:02} [loggers.py:259] Engine 000: "
            f"Avg prompt throughput: {(state.computed - before.computed) / 10:.1f} tokens/s, "
            f"Avg generation throughput: {(state.generated - before.generated) / 10:.1f} tokens/s, "
            f"Running: {state.running} reqs, Waiting: {state.waiting} reqs, GPU KV cache usage: {usage:.1f}%, "
            "Prefix cache hit rate: 0.0%\n"
        )
    path = folder / "vllm.log"
    path.write_text(head + "".join(lines))
    return str(path)


def test_a_log_of_the_same_run_agrees(tmp_path: Path) -> None:
    source = trace(tmp_path)
    audit = run_audit(log_of_our_own(tmp_path, source), source, OPTIONS)
    assert audit.offset_s == pytest.approx(LATE, abs=0.3)
    terms = {term.term: term for term in audit.terms}
    for name in ("running, mean", "KV cache usage, mean", "generated tokens, mean"):
        term = terms[name]
        assert term.theirs is not None
        assert term.ours == pytest.approx(term.theirs, rel=0.05)
    assert terms["prefix cache hit rate"].ours == 0
    assert terms["preemptions"].theirs is None
    document = json.loads(json.dumps(audit.to_dict()))
    assert len(document["moments"]) == 5
    assert document["moments"][0]["running"].keys() == {"theirs", "ours"}


def test_the_pool_that_the_log_prints_is_simulated(tmp_path: Path) -> None:
    source = trace(tmp_path)
    head = (
        "INFO 12-01 09:59:00 [core.py:1] Initializing a V1 LLM engine (v0.19.0) with config: "
        "model='meta-llama/Llama-2-7b-hf', dtype=torch.float16, max_seq_len=2048\n"
        "INFO 12-01 09:59:30 [kv_cache_utils.py:1] # GPU blocks: 400, # CPU blocks: 0\n"
    )
    audit = run_audit(log_of_our_own(tmp_path, source, head), source, SimulateOptions(gpu="h100-80gb"))
    config = audit.result.config
    assert config["num_gpu_blocks"].value == 400
    assert config["model"].value == "meta-llama/Llama-2-7b-hf"
    assert audit.result.kv.num_gpu_blocks == 400


def test_what_has_no_throughput_lines_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("batch_size,context_mean,step_ms\n1,2,3\n")
    with pytest.raises(InputError, match="the log has no throughput lines"):
        run_audit(str(path), trace(tmp_path), OPTIONS)
