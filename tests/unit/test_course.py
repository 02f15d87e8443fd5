"""How a run stood at any moment."""

from __future__ import annotations

import json
from pathlib import Path

from kvplan.core.course import Course, Moment
from kvplan.core.request import PICOSECONDS
from kvplan.jobs.simulate import Simulation
from kvplan.options import SimulateOptions


def course_of(folder: Path, *lines: dict[str, object], blocks: int = 100) -> Course:
    path = folder / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = SimulateOptions(
        num_gpu_blocks_override=blocks, step_time=0.1, max_model_len=400, async_scheduling=False
    )
    simulation = Simulation(str(path), options)
    course = Course(simulation.usable_blocks)
    simulation.run(turns=[course])
    return course


def at(course: Course, seconds: float) -> Moment:
    return course.at(round(seconds * PICOSECONDS))


def test_queues_blocks_and_tokens_over_a_run(tmp_path: Path) -> None:
    # One request of 20 tokens from 1 s on: a step of prompt, then 9 of decoding, 0.1 s each.
    course = course_of(tmp_path, {"arrival_s": 1, "input_tokens": 20, "output_tokens": 10})
    assert at(course, 0.5) == Moment()
    early = at(course, 1.05)
    assert (early.running, early.waiting, early.used_blocks) == (1, 0, 2)
    assert (early.generated, early.computed) == (0.5, 10.0)
    # After five steps there are five tokens; at token 33 the third block is taken, which never comes.
    assert (at(course, 1.5).generated, at(course, 1.5).computed) == (5.0, 20.0)
    assert at(course, 1.95).running == 1
    over = at(course, 2.0)
    assert (over.running, over.used_blocks, over.generated) == (0, 0, 10)
    assert course.end == 2 * PICOSECONDS


def test_blocks_grow_within_a_run_of_decodes(tmp_path: Path) -> None:
    course = course_of(tmp_path, {"arrival_s": 0, "input_tokens": 16, "output_tokens": 100})
    used = [at(course, second).used_blocks for second in (0.05, 1.65, 1.75, 9.85)]
    # The prompt's block; the second from the first decode on, the third from token 33.
    assert used == [1, 2, 3, 8]


def test_hits_and_preemptions_are_counted(tmp_path: Path) -> None:
    prompt = [["s", 0, 64]]
    lines: list[dict[str, object]] = [
        {"arrival_s": 0, "input_tokens": 64, "output_tokens": 200, "content": prompt},
        {"arrival_s": 2, "input_tokens": 64, "output_tokens": 200, "content": prompt},
    ]
    course = course_of(tmp_path, *lines, blocks=26)
    last = course.at(course.end)
    assert (last.queried, last.hit) == (128, 48)
    assert last.preempted > 0
    # The first prompt whole, of the second what was not hit, and the last token of each that comes back; what is
    # computed again does not count.
    assert 64 + 16 <= last.computed <= 64 + 16 + last.preempted
