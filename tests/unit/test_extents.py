"""The fast engine's pool on its own: nothing is kept alive, nothing grows with the past."""

from __future__ import annotations

import gc
from random import Random

from kvplan.core.cost import constant, constant_decode
from kvplan.core.engine import SchedulerConfig
from kvplan.core.engines.vllm import Vllm
from kvplan.core.extents import Extent, ExtentPool, Node
from kvplan.core.metrics import Metrics
from kvplan.core.request import Request, Segment
from kvplan.core.simulate import run


def config(num_gpu_blocks: int) -> SchedulerConfig:
    return SchedulerConfig(num_gpu_blocks, 16, 2048, 64, 4096)


def play(requests: list[Request], num_gpu_blocks: int) -> Vllm:
    engine = Vllm(config(num_gpu_blocks))
    metrics = Metrics(
        num_gpu_blocks=num_gpu_blocks, block_size=16, prefix_caching=True, seconds_per_tick=None
    )
    outcome = run(requests, engine, constant(1), metrics, decode_price=constant_decode(1), step_numbered=True)
    assert outcome.status == "done"
    return engine


def nodes_of(pool: ExtentPool) -> list[Node]:
    """All nodes; what is asked for here is no longer a lone sequence's."""
    nodes = [found for found in pool.index.values() if isinstance(found, Node)]
    assert len(nodes) == len(pool.index)
    return nodes


def check_nodes(pool: ExtentPool) -> None:
    """What a node says of its parts is what they are."""
    for node in nodes_of(pool):
        positions = [p for part in node.parts for p in range(part.low, part.high)]
        assert node.high == max(positions) + 1
        first = 0 if isinstance(node.key, str) else node.key[1]
        assert node.copies == len(positions) - (node.high - first)
        if not node.copies:
            assert positions == list(range(first, node.high))


def test_evicted_content_is_let_go_though_a_hot_prefix_stays() -> None:
    shared = Segment("sys", 0, 64)
    first = [Request("first", 0, 80, 2, content=(shared, Segment("p:first", 0, 16)))]
    later = [
        Request(f"r{i}", 20 + 2 * i, 164, 4, content=(shared, Segment(f"p:r{i}", 0, 100)))
        for i in range(3000)
    ]
    engine = play(first + later, num_gpu_blocks=300)
    gc.collect()
    alive = sum(1 for thing in gc.get_objects() if isinstance(thing, Extent))
    indexed = sum(len(node.parts) for node in nodes_of(engine.pool))
    assert alive <= indexed + 1  # and the list's end


def test_copies_are_counted_and_forgotten() -> None:
    rng = Random(1)
    requests = []
    for i in range(600):
        length = rng.choice([64, 64, 128, 30, 200])
        requests.append(
            Request(f"r{i}", i // 3, length, rng.randint(1, 40), content=(Segment("doc", 0, length),))
        )
    engine = Vllm(config(120))
    metrics = Metrics(num_gpu_blocks=120, block_size=16, prefix_caching=True, seconds_per_tick=None)
    run(
        requests,
        engine,
        constant(1),
        metrics,
        decode_price=constant_decode(1),
        step_numbered=True,
        observe=lambda _record: check_nodes(engine.pool),
    )
    check_nodes(engine.pool)
    assert metrics.evicted_blocks > 100


def test_a_document_read_to_many_depths_is_kept_in_few_pieces() -> None:
    rng = Random(2)
    lengths = [rng.randrange(16, 32_000) for _ in range(500)]
    requests = [
        Request(f"r{i}", 60 * i, length, 1, content=(Segment("doc", 0, length),))
        for i, length in enumerate([2048, 2048, *lengths])
    ]
    engine = Vllm(SchedulerConfig(3000, 16, 40_000, 64, 40_000))
    metrics = Metrics(num_gpu_blocks=3000, block_size=16, prefix_caching=True, seconds_per_tick=None)
    run(requests, engine, constant(1), metrics, decode_price=constant_decode(1), step_numbered=True)
    document = engine.pool.index["doc"]
    assert isinstance(document, Node)
    assert len(document.parts) < 60  # about 30 copies of last blocks, and what differs in age


def test_a_private_prompt_and_its_answer_are_one_part_until_somebody_asks() -> None:
    """20 tokens and 15 more with KV: two full blocks; the second, partly answer, is taken off when it is asked for."""
    lone = Request("lone", 0, 20, 16)
    engine = play([lone], num_gpu_blocks=100)
    (part,) = engine.pool.index.values()
    assert isinstance(part, Extent)
    assert (part.low, part.high, part.users) == (0, 2, 0)
    asking = Request("asking", 90, 36, 1, content=(Segment("p:lone", 0, 20), Segment("o:lone", 0, 16)))
    engine = play([lone, asking], num_gpu_blocks=100)
    first, second = nodes_of(engine.pool)
    assert [(part.low, part.high) for part in first.parts] == [(0, 1)]
    assert second.key == (first, 1, (("p:lone", 16, 4), ("o:lone", 0, 12)))
    assert [(part.low, part.high) for part in second.parts] == [(1, 2)]
