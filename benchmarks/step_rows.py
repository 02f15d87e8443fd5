"""Rows of measured decode steps as the model of step times sees them."""

from __future__ import annotations

import csv
import json
import tempfile
import zlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kvplan.config import load_gpu, load_model
from kvplan.core.cost import LatencyModel, Settings
from kvplan.core.engine import StepWork
from kvplan.core.gpu import Gpu
from kvplan.core.step_constants import EngineCosts, StepConstants, vllm_generation
from kvplan.core.step_shape import GpuRates, StageShape
from kvplan.options import Resolver, SizeOptions
from kvplan.serving import Served, find_gpu, serve
from kvplan.step_time import choose_constants, gpu_rates, stage_shapes

GPUS = {
    "A100-SXM4-80GB": "a100-80gb",
    "H100-SXM-80GB": "h100-80gb",
    "H100-SXM-80GB(power-capped)": "h100-80gb",
    "RTX 4090 24GB": "rtx-4090",
    "RTX PRO 6000 96GB": "rtx-pro-6000",
}
#: BLOOM-176B, which the catalogue has not: its config on Hugging Face.
BLOOM = {
    "architectures": ["BloomForCausalLM"],
    "hidden_size": 14336,
    "n_layer": 70,
    "num_attention_heads": 112,
    "vocab_size": 250880,
    "torch_dtype": "bfloat16",
    "seq_length": 8192,
}
MODELS = {
    "llama2-70b": "llama-2-70b",
    "meta-llama/Llama-2-7b-hf": "llama-2-7b",
    "meta-llama/Llama-2-70b-hf": "llama-2-70b",
    "codellama/CodeLlama-34b-Instruct-hf": "codellama-34b",
    "meta-llama/Llama-3.1-8B": "llama-3.1-8b",
}
#: Tokens of a block, of which the prefix cache finds whole ones.
BLOCK = 16


class StepRow(NamedTuple):
    """One measured step: where it ran and in how many seconds. ``is_fitted`` rows fit constants."""

    kind: str
    model: str
    gpu: Gpu
    tp: int
    batch: float
    context: float
    prompt: float
    prompts_per_s: float
    seconds: float
    generation: EngineCosts
    is_fitted: bool

    def predict(self, constants: StepConstants | None = None) -> float:
        """Seconds by the model, with the constants that are shipped for its GPU and engine unless others are given.

        A batch that is a mean over time is priced between the two whole ones. Under load a request sees, beside
        decode steps, those that compute a prompt's chunk: at r prompts a second, each of which makes its step d
        seconds longer, a step of mean length t holds r t of them, so t = t0 + r t d.
        """
        shapes, rates = shapes_of(self.model, self.gpu.name, self.tp)
        chosen = constants or choose_constants(self.gpu, self.generation).constants
        model = LatencyModel(shapes, rates, chosen, self.settings)
        least = max(1, int(self.batch))
        part = max(0.0, self.batch - least)
        alone = self._step(model, least) * (1 - part) + self._step(model, least + 1) * part
        if not self.prompts_per_s:
            return alone
        found = cached_tokens(self.prompt)
        chunk = found, round(self.prompt) - found
        longer = self._step(model, least, [chunk]) - self._step(model, least)
        return alone / (1 - self.prompts_per_s * longer)

    @property
    def settings(self) -> Settings:
        """Of its engine."""
        return Settings(512 if self.generation.has_graphs else 0, self.generation.overlaps_host)

    def _step(self, model: LatencyModel, batch: int, chunks: list[tuple[int, int]] | None = None) -> float:
        sampled = batch + len(chunks or [])
        return model.step_ps(StepWork(batch, round(batch * self.context), chunks or [], sampled)) * 1e-12


def cached_tokens(prompt: float) -> int:
    """Tokens of a prompt that are found in the prefix cache, where every prompt has come before: all whole blocks.

    The runs under load draw their prompts from 44 to 50 (`serving_runs.csv`: so many system prompts x so many users),
    and vLLM keeps prefixes by default. Were they computed, CodeLlama-34B at 20 requests a second would spend 0.4 of
    the time on them, and weights would have to be read faster than the memory can in the rest.
    """
    return (round(prompt) - 1) // BLOCK * BLOCK


def read_steps(file: Path) -> list[StepRow]:
    """The rows of ``decode_step_latency.csv`` that say what the context was."""
    with file.open(encoding="utf-8", newline="") as lines:
        return [_row(row) for row in csv.DictReader(lines) if row["context_mean"]]


def _row(row: dict[str, str]) -> StepRow:
    prompt = float(row["prompt_len"] or 0)
    old = row["kind"] == "offline_static_batch"
    key = "/".join(row[name] for name in ("run_id", "batch_size", "prompt_len", "output_len", "step_ms"))
    gpu = gpu_named(GPUS[row["gpu"]])
    return StepRow(
        row["kind"],
        row["model"],
        gpu,
        int(row["tp"]),
        float(row["batch_size"]),
        float(row["context_mean"]),
        prompt,
        float(row["prefill_tok_s"] or 0) / prompt if prompt else 0.0,
        float(row["step_ms"]) * 1e-3,
        vllm_generation((0, 4) if old else (0, 19), architecture=gpu.architecture),
        zlib.crc32(key.encode()) % 3 == 0,
    )


gpu_named = cache(load_gpu)


@cache
def shapes_of(model: str, gpu: str, tp: int) -> tuple[tuple[StageShape, ...], GpuRates]:
    """What a rank does, and what its GPU can do."""
    served = served_model(model, gpu, tensor_parallel_size=tp)
    return stage_shapes(served), gpu_rates(served.gpu)


def served_model(model: str, gpu: str, **options: object) -> Served:
    """A model on a GPU, however little memory that has."""
    values = {"gpu": gpu, "max_model_len": 2048, "gpu_memory": "4000GiB", **options}
    resolver = Resolver(SizeOptions.of(values))
    found, count = find_gpu(gpu)
    if model == "bloom-176b":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(BLOOM), encoding="utf-8")
            return serve(load_model(str(path)), resolver, gpu=found, gpu_count=count)
    return serve(load_model(MODELS.get(model, model)), resolver, gpu=found, gpu_count=count)
