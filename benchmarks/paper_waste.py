"""Where KV memory goes in contiguous and paged engines, beside figure 2 of the vLLM paper (Kwon et al. 2023).

OPT-13B with 12 GiB of KV memory (table 1: 15.7 K slots), requests with the lengths of ShareGPT: means of 161 prompt and
338 output tokens (figure 11), drawn log-normal. The paper does not say how widely they spread. That of the outputs is
taken from its own figure: Orca (Max) holds 20.4 + 13.3 % of the slots in tokens and slots to be filled, so requests
weighted by the time they stay are 756 tokens long, and E[output^2] / E[output]^2 is 1.76, which is a sigma of 0.75.

The paper's shares are of the whole memory; kvplan's of what is held (docs/metrics.md). Both are printed.

Usage: python benchmarks/paper_waste.py [--requests N] [--rate R] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from random import Random

from kvplan.jobs.compare import compare

#: Figure 2, of the whole KV memory: tokens, to be filled, internal fragmentation, holes and others.
PAPER = {
    "orca-max": (20.4, 13.3, 57.3, 8.9),
    "orca-pow2": (26.8, 17.9, 13.6, 41.6),
    "orca-oracle": (38.2, 25.2, 0.0, 36.6),
    "paged": (96.3, None, None, None),
}
LONGEST = 2048


def drawn(count: int, rate: float, spread: float) -> list[dict[str, object]]:
    """Requests with a Poisson process of arrivals; longer ones than the model takes are left out, as in the paper."""
    rng = Random(20230917)
    rows: list[dict[str, object]] = []
    now = 0.0
    while len(rows) < count:
        prompt = round(rng.lognormvariate(math.log(161.31) - 1.0**2 / 2, 1.0))
        output = round(rng.lognormvariate(math.log(337.99) - spread**2 / 2, spread))
        if prompt < 1 or output < 1 or prompt + output > LONGEST:
            continue
        now += rng.expovariate(rate)
        rows.append(
            {
                "id": f"r{len(rows)}",
                "arrival_s": round(now, 6),
                "input_tokens": prompt,
                "output_tokens": output,
            }
        )
    return rows


def main() -> None:
    """Run every engine on the same requests and print the shares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second; every engine has a queue")
    parser.add_argument("--spread", type=float, default=0.75, help="sigma of the output lengths")
    parser.add_argument("--engines", default="static,orca-max,orca-pow2,orca-oracle,paged,vllm")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = drawn(arguments.requests, arguments.rate, arguments.spread)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sharegpt-like.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        result = compare(
            path,
            engines=arguments.engines.split(","),
            jobs=arguments.jobs,
            model="opt-13b",
            gpu="a100-40gb",
            kv_cache_memory_bytes="12GiB",
            enable_prefix_caching=False,
        )
    table = []
    for run in result.runs:
        assert run.result is not None, run.error
        kv = run.result.kv
        shares = (
            kv.token_share,
            kv.reserved_share,
            kv.internal_fragmentation,
            kv.external_fragmentation,
        )
        held = [100 * (share or 0.0) for share in shares]
        # Holes lie outside what is referenced, which `utilization` counts.
        referenced = 100 * (kv.utilization.mean or 0.0)
        scale = referenced / (100 - held[3])
        engine = str(run.changes["engine"])
        of_all = [scale * share for share in held[:3]]
        table.append(
            {
                "engine": engine,
                "of_held": held,
                "of_all": [*of_all, 100 - sum(of_all)],
                "paper_of_all": PAPER.get(engine),
                "running_mean": run.result.batch.running_mean,
                "requests_per_s": run.result.throughput.requests_per_s,
            }
        )
    if arguments.json:
        json.dump(table, sys.stdout, indent=2)
        return
    print(f"{'engine':12}  of what is held            of all memory              the paper, of all memory")
    for row in table:
        paper = row["paper_of_all"] or (None,) * 4
        cells = "  ".join(
            " ".join("    -" if share is None else f"{share:5.1f}" for share in shares)
            for shares in (row["of_held"], row["of_all"], paper)
        )
        print(
            f"{row['engine']:12}  {cells}  running {row['running_mean']:.1f}, {row['requests_per_s']:.2f}/s"
        )
    mean = [sum(row[name] for row in rows) / len(rows) for name in ("input_tokens", "output_tokens")]
    print(f"tokens, to be filled, waste, holes (of all memory: and what is free), %; {len(rows):,} requests,")
    print(f"means {mean[0]:.0f} in, {mean[1]:.0f} out")


if __name__ == "__main__":
    main()
