"""What the fast engine does for each request, counted: neither longer runs nor larger pools nor prompts add to it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from kvplan.core.cohort import Member
from kvplan.core.cost import constant, constant_decode
from kvplan.core.engine import SchedulerConfig, Turn
from kvplan.core.engines.full_blocks import FullBlocks
from kvplan.core.engines.vllm import Vllm
from kvplan.core.extents import Extent, ExtentPool, Holding, Node
from kvplan.core.metrics import Metrics
from kvplan.core.request import Request, Segment
from kvplan.core.simulate import run


class CountingPool(ExtentPool):
    """Counts extents that are made, cut, freed, or taken out of the idle list."""

    touched = 0

    def _enter(self, holding: Holding, node: Node, high: int) -> None:
        self.touched += 1
        super()._enter(holding, node, high)

    def _cut(self, extent: Extent, at: int) -> Extent:
        self.touched += 1
        return super()._cut(extent, at)

    def _push(self, extent: Extent) -> None:
        self.touched += 1
        super()._push(extent)

    def _unlink(self, extent: Extent) -> None:
        self.touched += 1
        super()._unlink(extent)


class CountingEngine(Vllm):
    """Counts walks over the running list."""

    walks = 0

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        blocks = FullBlocks(config, self.cohort, self._live)
        self.blocks = blocks
        self.pool = blocks.pool = CountingPool(config.usable_blocks)

    def _walk(self, turn: Turn[Member], cap: int) -> dict[Member, int]:
        self.walks += 1
        return super()._walk(turn, cap)


@dataclass(frozen=True)
class Work:
    """Counts for each request."""

    turns: float
    extents: float
    walks: float
    preemptions: int


def work(requests: list[Request], num_gpu_blocks: int, *, caching: bool = True) -> Work:
    engine = CountingEngine(
        SchedulerConfig(num_gpu_blocks, 16, 8192, 256, 110_000, enable_prefix_caching=caching)
    )
    metrics = Metrics(
        num_gpu_blocks=num_gpu_blocks, block_size=16, prefix_caching=caching, seconds_per_tick=None
    )
    turns = 0

    def count(_record: object) -> None:
        nonlocal turns
        turns += 1

    outcome = run(
        requests,
        engine,
        constant(1),
        metrics,
        decode_price=constant_decode(1),
        step_numbered=True,
        observe=count,
    )
    assert outcome.status == "done"
    total = len(requests)
    return Work(turns / total, engine.pool.touched / total, engine.walks / total, metrics.preemption_events)


def drawn(count: int, *, gap: int, shared: bool = False) -> list[Request]:
    """Requests of about 510 prompt and 198 output tokens; ``shared`` prompts begin with one of 50 long prefixes."""
    rng = Random(7)
    now = 0
    requests = []
    for i in range(count):
        now += rng.randint(0, 2 * gap)
        length = rng.randint(20, 1000)
        content: tuple[Segment, ...] = ()
        if shared:
            common = rng.randint(1, length)
            content = (Segment(f"s{rng.randrange(50)}", 0, common), Segment(f"p:{i}", 0, length - common))
        requests.append(Request(str(i), now, length, rng.randint(10, 386), content=content))
    return requests


@pytest.mark.parametrize("num_gpu_blocks", [20_000, 4_096])
@pytest.mark.parametrize(("caching", "shared"), [(False, False), (True, False), (True, True)])
def test_work_for_each_request_stays_flat_as_runs_grow(
    num_gpu_blocks: int, caching: bool, shared: bool
) -> None:
    requests = drawn(20_000, gap=2, shared=shared)
    short, long = (work(requests[:count], num_gpu_blocks, caching=caching) for count in (1_000, 20_000))
    assert long.turns == pytest.approx(short.turns, rel=0.15)
    assert long.turns < 2.5
    assert long.extents <= 1.2 * short.extents + 1  # a short run evicts less
    assert long.extents < 25
    assert long.walks <= 1.5 * short.walks + 0.05  # a short run may not fill the pool
    assert long.walks < 0.3
    assert (long.preemptions > 0) == (num_gpu_blocks == 4_096)


@pytest.mark.parametrize("shared", [False, True])
def test_work_for_each_request_does_not_depend_on_the_size_of_the_pool(shared: bool) -> None:
    requests = drawn(2_000, gap=30, shared=shared)  # so few at once that the smallest pool holds them
    done = [work(requests, num_gpu_blocks) for num_gpu_blocks in (1_000, 10_000, 100_000, 1_000_000)]
    assert len({one.turns for one in done}) == 1
    assert {(one.walks, one.preemptions) for one in done} == {(0, 0)}
    assert max(one.extents for one in done) < 2 * min(one.extents for one in done)


def test_work_for_each_request_does_not_depend_on_the_length_of_its_prompt() -> None:
    # Prompts of 8,000 tokens fit one step; those of 100,000 take 13.
    def prompts(length: int) -> list[Request]:
        return [Request(str(i), 300 * i, length, 200) for i in range(300)]

    short, middle, long = (work(prompts(length), 20_000) for length in (80, 8_000, 100_000))
    assert (short.turns, middle.turns) == (2, 2)
    assert long.turns == 2 + 12
    # Short ones are never evicted; the blocks of a prompt enter with each of its chunks.
    assert (short.extents, middle.extents) == (pytest.approx(1, abs=0.1), pytest.approx(2, abs=0.5))
    assert long.extents == pytest.approx(2, abs=1)
