"""The job behind ``--min-blocks``: a number of blocks with which a trace meets a goal."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvplan.errors import InputError
from kvplan.jobs.simulate import SimulateResult, Simulation, Watch, replay
from kvplan.options import CONTIGUOUS_ENGINES, SimulateOptions, parse_engine


class Goal(NamedTuple):
    """``text`` as given; ``met`` judges a run."""

    text: str
    met: Callable[[SimulateResult], bool]
    is_no_preemption: bool = False


@dataclass(frozen=True, slots=True)
class MinBlocks:
    """The blocks that were found, null block included. ``proof`` says how far it is the least.

    ``tried`` pairs numbers of blocks with whether the goal was met; ``num_gpu_blocks`` is one that met it, None: not
    even an endless pool does.
    """

    goal: str
    num_gpu_blocks: int | None
    proof: str
    tried: tuple[tuple[int, bool], ...]

    @property
    def runs(self) -> int:
        """How often the trace was replayed."""
        return len(self.tried)

    def to_dict(self) -> dict[str, object]:
        """The ``min_blocks`` block of the JSON document."""
        return {
            "goal": self.goal,
            "num_gpu_blocks": self.num_gpu_blocks,
            "proof": self.proof,
            "runs": self.runs,
        }


def parse_goal(text: str, source: str, engine: str | None = None) -> Goal:
    """``0`` (no preemption), ``5%`` (of the requests preempted at most) or ``hit-rate=30%``.

    Raises `InputError` for another text, for standard input, which cannot be read several times, and for an engine
    that neither preempts nor caches.
    """
    name = parse_engine(engine).name
    if name in CONTIGUOUS_ENGINES:
        raise InputError(
            f"engine {name} preempts nobody and keeps no prefixes: every pool meets the goal",
            where="--min-blocks",
            hint="leave it out",
        )
    if source == "-":
        raise InputError(
            "the trace is read several times", where="--min-blocks", hint="give a file, not standard input"
        )
    match = re.fullmatch(r"\s*(hit-rate\s*=\s*)?([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*(%?)\s*", text)
    share = float(match.group(2)) / 100 if match else -1.0
    if not match or not 0 <= share <= 1 or (not match.group(3) and (match.group(1) or share)):
        raise InputError(
            f'"{text}" is no goal',
            where="--min-blocks",
            hint="write 0 (no preemption), 5% (of the requests at most) or hit-rate=30%",
        )
    if match.group(1):
        return Goal(text, lambda result: (result.prefix_cache.hit_rate or 0.0) >= share)
    if not share:
        return Goal(text, lambda result: result.preemptions.events == 0, is_no_preemption=True)
    return Goal(text, lambda result: result.preemptions.requests <= share * max(1, result.requests.total))


def find_min_blocks(
    source: str,
    options: SimulateOptions,
    goal: Goal,
    origins: Mapping[str, str] | None = None,
    *,
    watch: Watch | None = None,
) -> MinBlocks:
    """Replay a trace with pools of different size until a least one is found that meets the goal.

    Without prefix caching a run in an endless pool never preempts, and one block more than it ever used is
    enough, which a run with so many confirms. Else by bisection: preemptions are not monotone in the size of the
    pool, so a smaller one that was not tried may do too. None is tried with which the engine would not start.
    O(log pool) runs, which ``watch`` gives an observer each. Raises `KeyboardInterrupt` when one is interrupted.
    """
    tried: dict[int, bool] = {}

    def with_pool(blocks: int | None) -> Simulation:
        return Simulation(source, options, origins, num_gpu_blocks=blocks)

    def meets(blocks: int) -> bool:
        if blocks not in tried:
            result = replay(with_pool(blocks), watch)
            all_served = result.requests.rejected == endless.requests.rejected
            tried[blocks] = all_served and _is_met(result, goal)
        return tried[blocks]

    as_given = with_pool(None)
    as_given.trace.close()
    most = as_given.endless_pool
    in_endless = with_pool(most)
    endless = replay(in_endless, watch)
    tried[most] = _is_met(endless, goal)
    if not tried[most]:
        return MinBlocks(goal.text, None, "not even an endless pool meets it", tuple(tried.items()))
    enough, least = endless.kv.peak_blocks + 1, in_endless.least_pool
    high = max(least, enough)
    while not meets(high):
        high = min(2 * high, most)
    if high == enough and goal.is_no_preemption and not endless.prefix_cache.enabled:
        proof = "sufficient: one more than an endless pool ever used, confirmed by a run"
        return MinBlocks(goal.text, high, proof, tuple(tried.items()))
    low = least - 1
    while high - low > 1:
        middle = (low + high) // 2
        if meets(middle):
            high = middle
        else:
            low = middle
    proof = "the smallest found by bisection; one that was not tried may be smaller"
    if high == least:
        proof = "the least with which the engine starts: it must hold one sequence of --max-model-len"
    return MinBlocks(goal.text, high, proof, tuple(tried.items()))


def _is_met(result: SimulateResult, goal: Goal) -> bool:
    return result.simulation["status"] == "done" and goal.met(result)
