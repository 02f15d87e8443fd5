"""The paper's engine: what looking for a prefix costs, and what parallel samples save.

Usage: python benchmarks/bench_paged.py

1. Time to find nothing in the prefix cache for a private prompt: block by block, as the engine does it, and the naive
   way, which digests every prefix of the prompt, the longest first. One is linear in the prompt, the other quadratic.
2. Memory that sharing saves with n samples, as Kwon et al. 2023 define it in section 6.3 (blocks saved over blocks
   without sharing, over time), for lengths with the means of Alpaca (19 in, 58 out) and ShareGPT (161 in, 338 out),
   drawn from exponential distributions.
3. Token states of OPT-13B on an A100 with 40 GB with such lengths, at a rate that fills the pool.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import kvplan
from kvplan.core.content import cut
from kvplan.core.paged_blocks import Names, PrefixCache
from kvplan.core.request import Segment

BLOCK_SIZE = 16
LENGTHS = {"Alpaca": (19.3, 58.4), "ShareGPT": (161.3, 337.99)}


def block_by_block(content: tuple[Segment, ...], tokens: int) -> None:
    """Look as the engine does."""
    PrefixCache().find(Names(content, BLOCK_SIZE), tokens, tokens - 1)


def every_prefix(content: tuple[Segment, ...], tokens: int) -> None:
    """Digest the token ids of each prefix, from the longest down."""
    stored: dict[bytes, int] = {}
    for end in range(tokens - 1, 0, -1):
        ids = ",".join(f"{s.stream}{s.start + i}" for s in cut(content, 0, end) for i in range(s.length))
        if blake2b(ids.encode(), digest_size=16).digest() in stored:
            return


def seconds(look: Callable[[tuple[Segment, ...], int], None], tokens: int) -> float:
    """That one look takes, the best of three."""
    content = (Segment("system", 0, tokens // 2), Segment("own", 0, tokens - tokens // 2))
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        look(content, tokens)
        taken.append(time.perf_counter() - start)
    return min(taken)


def trace(path: Path, name: str, rate: float, count: int = 1500) -> str:
    """A trace with the means of a data set, written to a file."""
    draw = random.Random(name)
    mean_in, mean_out = LENGTHS[name]
    now = 0.0
    rows = []
    for number in range(count):
        now += draw.expovariate(rate)
        lengths = [1 + min(1000, int(draw.expovariate(1 / (mean - 1)))) for mean in (mean_in, mean_out)]
        rows.append(
            {
                "id": str(number),
                "arrival_s": round(now, 6),
                "input_tokens": lengths[0],
                "output_tokens": lengths[1],
            }
        )
    file = path / f"{name}-{rate}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def mean_blocks(source: str, **options: object) -> float:
    """Blocks in use over time, times the length of the run: a roomy pool, steps of equal length."""
    result = kvplan.simulate(
        source,
        engine="paged",
        num_gpu_blocks_override=10**6,
        max_num_seqs=2000,
        max_num_batched_tokens=10**6,
        step_time=0.02,
        enable_prefix_caching=False,
        **options,
    )
    mean = result.kv.utilization.mean
    assert mean is not None
    return mean


def main() -> None:
    """Measure and print."""
    print("Looking for a prefix that is not there")
    for tokens in (250, 500, 1000, 2000):
        one, all_ = seconds(block_by_block, tokens), seconds(every_prefix, tokens)
        print(f"{tokens:6,} tokens: block by block {one * 1e6:8.0f} us, every prefix {all_ * 1e6:12,.0f} us")
    with tempfile.TemporaryDirectory() as folder:
        print("Memory saved by n samples that share their prompt")
        for name in LENGTHS:
            source = trace(Path(folder), name, rate=4)
            alone = mean_blocks(source)
            for n in (2, 4, 6):
                print(f"{name:9} n = {n}: {1 - mean_blocks(source, n=n) / (n * alone):6.1%}")
        print("Token states, OPT-13B on an A100 with 40 GB")
        for name in LENGTHS:
            source = trace(Path(folder), name, rate=50)
            kv = kvplan.simulate(source, engine="paged", model="opt-13b", gpu="a100-40gb").kv
            print(
                f"{name:9} {kv.token_share:.1%} tokens, {kv.reserved_share:.1%} to be filled, "
                f"{kv.internal_fragmentation:.1%} waste; utilization {kv.utilization.mean:.1%}"
            )


if __name__ == "__main__":
    main()
