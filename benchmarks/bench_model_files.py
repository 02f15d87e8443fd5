"""How long headers of model files take to read: folders with many shards, many tensors, a tokenizer in a GGUF file.

The files have real headers and holes for data, in a temporary folder. Only headers are read, so that the size of the
data does not matter.

Usage: python benchmarks/bench_model_files.py [--runs N] [--json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kvplan.gguf import read_gguf
from kvplan.safetensors import INDEX_NAME, read_stored_weights

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


def write_shards(folder: Path, shards: int, tensors: int) -> None:
    """A folder with a config, an index and shards that have the tensors among them, named as DeepSeek-V3's are."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for number in range(shard * tensors // shards, (shard + 1) * tensors // shards):
            name = f"model.layers.{number // 1500}.mlp.experts.{number % 1500}.down_proj.weight"
            header[name] = {"dtype": "BF16", "shape": [1024, 64], "data_offsets": [end, end + 131072]}
            end += 131072
            weight_map[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + end)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2))


def write_gguf(path: Path, tokens: int, merges: int, tensors: int) -> None:
    """A GGUF file with a tokenizer."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    def texts(key: str, number: int) -> bytes:
        start = text(key) + struct.pack("<IIQ", 9, 8, number)
        return start + b"".join(text(f"token {i}") for i in range(number))

    parts = [b"GGUF", struct.pack("<IQQ", 3, tensors, 2)]
    parts += [texts("tokenizer.ggml.tokens", tokens), texts("tokenizer.ggml.merges", merges)]
    for number in range(tensors):
        parts.append(text(f"blk.{number}.ffn_up.weight"))
        parts.append(struct.pack("<IQQIQ", 2, 4096, 4096, 12, number * (4096 * 4096 // 256 * 144)))
    header = b"".join(parts)
    with path.open("wb") as out:
        out.write(header)
        out.truncate(len(header) + 32 + tensors * (4096 * 4096 // 256 * 144))


def main() -> None:
    """Time each case and print the median and the spread."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_shards(folder / "few", 200, 1000)
        write_shards(folder / "many", 200, 92_000)
        write_shards(folder / "one", 1, 100_000)
        write_gguf(folder / "model.gguf", 128_256, 280_147, 720)

        def size(model: Path) -> None:
            command = [sys.executable, "-m", "kvplan", "size", str(model), "--json"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

        cases: dict[str, Callable[[], object]] = {
            "200 shards, 1,000 tensors": lambda: read_stored_weights(folder / "few"),
            "200 shards, 92,000 tensors": lambda: read_stored_weights(folder / "many"),
            "1 file, 100,000 tensors": lambda: read_stored_weights(folder / "one"),
            "GGUF, 128,256 tokens, 280,147 merges": lambda: read_gguf(folder / "model.gguf"),
            "kvplan size llama-2-13b --json": lambda: size(Path("llama-2-13b")),
            "kvplan size, 200 shards, 1,000 tensors": lambda: size(folder / "few"),
            "kvplan size, 200 shards, 92,000 tensors": lambda: size(folder / "many"),
        }
        rows = []
        for case, work in cases.items():
            seconds = []
            for _ in range(arguments.runs):
                start = time.perf_counter()
                work()
                seconds.append(time.perf_counter() - start)
            rows.append(
                {
                    "case": case,
                    "median_s": statistics.median(seconds),
                    "min_s": min(seconds),
                    "max_s": max(seconds),
                }
            )
    if arguments.json:
        print(json.dumps({"python": platform.python_version(), "runs": arguments.runs, "rows": rows}))
        return
    print(f"Python {platform.python_version()}, {arguments.runs} runs each")
    for row in rows:
        print(
            f"{row['case']:42} {row['median_s'] * 1e3:7.1f} ms  ({row['min_s'] * 1e3:.0f}..{row['max_s'] * 1e3:.0f})"
        )


if __name__ == "__main__":
    main()
