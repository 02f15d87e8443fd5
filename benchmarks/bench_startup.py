"""Start-up of kvplan beside an empty Typer application, in child processes.

Usage: python benchmarks/bench_startup.py [--runs N] [--json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time

EMPTY = """
import typer
app = typer.Typer()
@app.command()
def main() -> None: ...
app()
"""

COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "empty Typer app": [sys.executable, "-c", EMPTY],
    "empty Typer app --help": [sys.executable, "-c", EMPTY, "--help"],
    "kvplan --help": [sys.executable, "-m", "kvplan", "--help"],
    "kvplan size llama-2-13b --seq 4096 --json": [
        *[sys.executable, "-m", "kvplan"],
        *["size", "llama-2-13b", "--seq", "4096", "--json"],
    ],
    "kvplan size llama-2-13b --seq 4096": [
        *[sys.executable, "-m", "kvplan"],
        *["size", "llama-2-13b", "--seq", "4096"],
    ],
}


def main() -> None:
    """Time each command, interleaved, and print the median and the spread."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(arguments.runs):
        for name, command in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds[name].append(time.perf_counter() - start)
    base = statistics.median(seconds["empty Typer app"])
    rows = [
        {
            "command": name,
            "median_s": statistics.median(times),
            "min_s": min(times),
            "max_s": max(times),
            "times_empty_typer": statistics.median(times) / base,
        }
        for name, times in seconds.items()
    ]
    if arguments.json:
        print(json.dumps({"python": platform.python_version(), "runs": arguments.runs, "rows": rows}))
        return
    print(f"Python {platform.python_version()}, {arguments.runs} runs each")
    for row in rows:
        print(
            f"{row['command']:45} {row['median_s'] * 1e3:7.1f} ms  "
            f"({row['min_s'] * 1e3:.0f}..{row['max_s'] * 1e3:.0f})  {row['times_empty_typer']:.2f}x"
        )


if __name__ == "__main__":
    main()
