"""The plain engine against what the real vLLM 0.33.0 scheduler did, every step of every scenario."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from kvplan.core.simulate import StepRecord
from kvplan.jobs.simulate import SimulateResult, Simulation
from kvplan.options import SimulateOptions
from kvplan.simulated_engines import EngineConfig, has_fast_path

DATA = Path(__file__).parent / "data"
SCENARIOS = sorted(path.name.removesuffix(".scenario.json") for path in DATA.glob("*.scenario.json"))
SMALL = [name for name in SCENARIOS if (DATA / f"{name}.golden.jsonl").exists()]
LARGE = [name for name in SCENARIOS if (DATA / f"{name}.golden.csv").exists()]


def settings(name: str) -> EngineConfig:
    return Simulation(str(DATA / f"{name}.scenario.json"), SimulateOptions()).engine_config


def test_every_scenario_has_a_golden() -> None:
    assert len(SCENARIOS) == 108
    assert sorted(SMALL + LARGE) == SCENARIOS


def play(name: str) -> tuple[list[dict[str, object]], SimulateResult]:
    lines: list[dict[str, object]] = []
    simulation = Simulation(str(DATA / f"{name}.scenario.json"), SimulateOptions())
    has_queue = simulation.engine_config.queue_size > 1
    emits = has_queue or simulation.engine_config.speculative is not None
    observe = [lambda record: lines.append(line(record, has_queue=has_queue, emits=emits))]
    return lines, simulation.run(observe)


def line(record: StepRecord, *, has_queue: bool, emits: bool) -> dict[str, object]:
    """A step in the golden's own form."""
    turn = record.turn
    found: dict[str, object] = {
        "arrived": [r.id for r in record.arrived],
        "rejected": [r.id for r in record.rejected],
        "aborted": record.aborted,
    }
    always: dict[str, object] = {"step": record.step}
    if turn is None:
        if record.aborted:
            always["free_end"] = record.free_blocks
        return always | {key: value for key, value in found.items() if value}
    found |= {
        "new": [s.id for s in turn.admitted],
        "resumed": [s.id for s in turn.resumed],
        "preempted": [s.id for s in turn.preempted],
        "finished": [s.id for s in turn.finished],
        "evicted": len(turn.evicted_blocks),
        "evicted_blocks": list(turn.evicted_blocks),
        "cached": {s.id: tokens for s, tokens in turn.prefix_hits},
        "blocks": {s.id: blocks for s, blocks in (turn.new_blocks | turn.new_tables).items()},
        "drafts": {s.id: drafts for s, drafts in turn.drafts.items()},
    }
    if emits:
        found["emitted"] = [[s.id, 1 + turn.extra_tokens.get(s, 0)] for s in turn.sampled]
    always["free_end"] = turn.free_blocks_end
    if turn.planned:
        always |= {
            "tokens": turn.scheduled_tokens,
            "free": turn.free_blocks,
            "running": turn.running,
            "waiting": turn.waiting,
        }
        if turn.scheduled or turn.preempted or not has_queue:
            always["sched"] = [[s.id, tokens] for s, tokens in turn.scheduled]
    if has_queue:
        always["depth"] = record.depth
        if record.out is not None:
            always["out"] = record.out
    return always | {key: value for key, value in found.items() if value}


@pytest.mark.parametrize("name", SMALL)
def test_small_scenario_step_by_step_with_block_ids(name: str) -> None:
    golden = [json.loads(text) for text in (DATA / f"{name}.golden.jsonl").read_text().splitlines()]
    lines, result = play(name)
    # The queues' contents are checked by their lengths, and by who is scheduled next; usage follows from free.
    left_out = {"type", "usage", "run_q", "wait_q"}
    steps = [{k: v for k, v in row.items() if k not in left_out} for row in golden if row["type"] == "step"]
    for ours, theirs in zip(lines, steps, strict=True):
        assert ours == theirs
    summary = golden[-1]
    assert result.simulation["status"] == summary["status"]
    assert result.steps == summary["steps"]
    assert result.scheduled_tokens == summary["scheduled_tokens"]
    assert result.preemptions.events == summary["preemptions"]
    assert result.prefix_cache.evicted_blocks == summary["evictions"]
    assert result.requests.unfinished == len(summary.get("unfinished", []))


@pytest.mark.parametrize("name", [name for name in SCENARIOS if has_fast_path(settings(name))])
def test_fast_engine_comes_to_the_same_figures(name: str) -> None:
    path, options = str(DATA / f"{name}.scenario.json"), SimulateOptions(step_time=0.5)
    plain, fast = (Simulation(path, options).run(path=which).to_dict() for which in ("plain", "fast"))
    assert (plain["simulation"].pop("engine_path"), fast["simulation"].pop("engine_path")) == (
        "plain",
        "fast",
    )
    assert plain == fast


@pytest.mark.parametrize("name", LARGE)
def test_large_scenario_digest_of_every_row(name: str) -> None:
    text = (DATA / f"{name}.golden.csv").read_text().splitlines()
    summary = json.loads(text[-1].removeprefix("# "))
    columns = text[1].split(",")
    rows = [dict(zip(columns, row.split(","), strict=True)) for row in text[2:-1]]
    lines, result = play(name)
    steps = [found for found in lines if "sched" in found]
    digest = 0
    for ours, theirs in zip(steps, rows, strict=True):
        parts = [ours["step"], ours["sched"]]
        parts += [ours.get(key, []) for key in ("new", "resumed", "preempted", "finished")]
        parts += [ours.get("cached", {}), ours["free"], ours["free_end"]]
        digest = zlib.crc32(json.dumps(parts, separators=(",", ":")).encode(), digest)
        assert f"{digest:08x}" == theirs["digest"], f"step {ours['step']} differs"
    assert (result.simulation["status"], result.steps) == (summary["status"], summary["steps"])
    assert result.scheduled_tokens == summary["scheduled_tokens"]
    assert result.preemptions.events == summary["preemptions"]
    hits = result.prefix_cache.hit_tokens + result.prefix_cache.resumed_hit_tokens
    assert hits == summary["admission_hits"]
