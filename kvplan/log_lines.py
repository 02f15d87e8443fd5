"""What engines print when they start, as a table: one template a log statement, old and new wordings.

A template is the message with fields in braces, ``{name:kind}``; two blanks stand for any number of them, ``{_}`` for
anything. The name says where the value goes: ``set.X`` is a setting under the name that `kvplan.options` has, ``own.X``
one of the engine's own, ``version`` and ``label`` (a device) what they say, ``config`` a printed configuration, and any
other name a figure. The kind says unit and rounding.

Sources: vLLM 0.2 to 0.33 (worker/worker.py, executor/executor_base.py, v1/worker/gpu_worker.py, gpu_model_runner.py,
v1/core/kv_cache_utils.py, kv_cache_planning.py, config), SGLang 0.4 to 0.5 (srt/model_executor, srt/mem_cache,
srt/managers/scheduler.py), TensorRT-LLM 0.5 to 1.2 (batch_manager/kvCacheManager.cpp, _torch/pyexecutor/_util.py),
llama.cpp (src/llama-kv-cache.cpp, llama-model.cpp, llama-context.cpp), Ollama (server, llm).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from math import ceil, floor
from typing import Literal, NamedTuple

Engine = Literal["vllm", "sglang", "tensorrt-llm", "llama.cpp"]

#: What a line does beside giving values. ``start``: the engine starts. ``engine``: one of its engine processes
#: starts. ``ready``: it serves; what follows is traffic. ``refusal``: it gives up. ``draft``: a second, small
#: model follows. ``pool``: names the cache that the next lines speak of.
Role = Literal["", "start", "engine", "ready", "refusal", "draft", "pool"]


#: What a figure is counted in.
Unit = Literal["bytes", "tokens", "blocks", "count", "times", "share", "percent"]


class Bracket(NamedTuple):
    """A printed number and what may have been before it was rounded: every value from ``low`` to ``high``."""

    value: int | float
    low: int | float
    high: int | float
    unit: Unit


class Field(NamedTuple):
    """Where a group of a pattern goes and how it is read."""

    group: str
    target: str
    kind: str


class Rule(NamedTuple):
    """One log statement. ``key`` is a plain part of it, to pass quickly over other lines."""

    engine: Engine
    key: str
    pattern: re.Pattern[str]
    fields: tuple[Field, ...]
    role: Role
    cache: str

    @property
    def has_config(self) -> bool:
        """Whether the rest of the line is a printed configuration, which may be long."""
        return any(field.target == "config" for field in self.fields)


class Scale(NamedTuple):
    """How a kind of number is printed: its factor, fewest decimals, and unit."""

    factor: int
    places: int
    unit: Unit
    #: Rounded down to the last digit rather than to the nearest.
    cut: bool = False
    #: Relative error of the number before it was printed, as one part in this many; 0: none.
    error: int = 0


_GIB, _MIB = 1 << 30, 1 << 20
#: vLLM prints sizes with two decimals (``%.2f``) or with as many as ``round(x, 2)`` leaves, so 4.5 stands for 4.50.
#: SGLang's and TensorRT-LLM's "GB" and "MB", and llama.cpp's old "MB", are 2^30 and 2^20 bytes. llama.cpp holds the
#: sizes of its caches in 32-bit floats before it prints them (src/llama-kv-cache.cpp).
_SCALES: Mapping[str, Scale] = {
    "gib": Scale(_GIB, 2, "bytes"),
    "mib": Scale(_MIB, 2, "bytes"),
    "mib32": Scale(_MIB, 2, "bytes", error=1 << 23),
    "wholemib": Scale(_MIB, 0, "bytes", cut=True),
    "bytes": Scale(1, 0, "bytes"),
    "tokens": Scale(1, 0, "tokens"),
    "blocks": Scale(1, 0, "blocks"),
    "count": Scale(1, 0, "count"),
}
#: Figures that stay as they are printed, with their decimals.
_RATIOS: Mapping[str, Unit] = {"ratio": "times", "share": "share", "percent": "percent"}
#: Numbers that are followed by a unit of their own, with the decimals that are printed.
_SIZE_FACTORS = {"B": 1, "KiB": 1 << 10, "MiB": _MIB, "GiB": _GIB, "TiB": 1 << 40}

_WHOLE = r"-?(?:[0-9]{1,3}(?:,[0-9]{3}){1,6}|[0-9]{1,18})"
_NUMBER = rf"{_WHOLE}(?:\.[0-9]{{1,12}})?"
_PATTERNS = {
    **dict.fromkeys(_SCALES, _NUMBER),
    **dict.fromkeys(_RATIOS, _NUMBER),
    "size": rf"{_NUMBER} ?(?:[KMGT]i)?B",
    "whole": _WHOLE,
    "number": r"-?[0-9]{1,18}(?:\.[0-9]{1,18})?",
    "switch": r"enabled|disabled|True|False",
    "word": r"[^\s,;()'\"]{1,200}",
    "path": r".{1,1000}?",
    "device": r"[A-Za-z][\w.-]{0,40}",
    "fields": r".*",
}


def bracket(text: str, kind: str) -> Bracket | None:
    """A printed number with what its rounding allows; None if it is no number of that kind.

    >>> bracket("4.5", "gib")
    Bracket(value=4831838208, low=4826469500, high=4837206916, unit='bytes')
    >>> bracket("23.06", "ratio")
    Bracket(value=23.06, low=23.055, high=23.065, unit='times')
    """
    unit = text.lstrip("-0123456789.,").strip()
    scale = Scale(_SIZE_FACTORS[unit], 0, "bytes") if kind == "size" else _SCALES.get(kind)
    value = Decimal(text.removesuffix(unit).strip().replace(",", ""))
    places = -int(value.as_tuple().exponent)
    step = Decimal(1).scaleb(-places if scale is None else -max(places, scale.places))
    if scale is None:
        return Bracket(float(value), float(value - step / 2), float(value + step / 2), _RATIOS[kind])
    if scale.factor == 1:
        return Bracket(int(value), int(value), int(value), scale.unit) if places == 0 else None
    low, high = (value, value + step) if scale.cut else (value - step / 2, value + step / 2)
    slack = abs(value) / scale.error if scale.error else Decimal(0)
    last = (high + slack) * scale.factor
    return Bracket(
        round(value * scale.factor),
        ceil((low - slack) * scale.factor),
        ceil(last) - 1 if scale.cut else floor(last),
        scale.unit,
    )


def _rule(engine: Engine, template: str, role: Role = "", *, cache: str = "") -> Rule:
    """A rule from a template."""
    pattern: list[str] = []
    fields: list[Field] = []
    plain = [""]
    for literal, name, kind in re.findall(r"([^{}]*)(?:\{([\w.]+)(?::(\w+))?\})?", template):
        first, *others = literal.split("  ")
        plain[-1] += first
        plain += others
        pattern.append(r"\s*".join(re.escape(part) for part in (first, *others)))
        if name == "_":
            pattern.append(r".{0,1000}?")
        elif name:
            fields.append(Field(f"f{len(fields)}", name, kind))
            pattern.append(f"(?P<{fields[-1].group}>{_PATTERNS[kind]})")
        plain += [""] if name else []
    return Rule(engine, max(plain, key=len), re.compile("".join(pattern)), tuple(fields), role, cache)


def _vllm() -> list[Rule]:
    free = "Free memory on device{_}({gpu_free:gib}/{gpu_total:gib} GiB) on startup"
    templates = [
        "(util), {requested:gib} GiB",
        "Initial free memory: {gpu_free:gib} GiB; Requested memory: {set.gpu_memory_utilization:number} (util)",
        "worker requested memory: {requested:gib}GiB",
        # V0, and V1 until 0.7: weights.
        "Loading model weights took {weights:gib} GB",
        "Loading model weights took {weights:gib} GiB",
        "Model loading took {weights:gib} GiB",
        # V0: the profile, 0.6 and 0.7 to 0.8.
        "total_gpu_memory={gpu_total:gib}GiB",
        "non_torch_memory={non_torch:gib}GiB kv_cache_size={kv_memory:gib}GiB",
        "gpu_memory_utilization={set.gpu_memory_utilization:number}",
        "total_gpu_memory ({gpu_total:gib}GiB) x gpu_memory_utilization "
        "({set.gpu_memory_utilization:number}) = {requested:gib}GiB",
        "model weights take {weights:gib}GiB; non_torch_memory takes {non_torch:gib}GiB; PyTorch activation peak "
        "memory takes {activations:gib}GiB; the rest of the memory reserved for KV Cache is {kv_memory:gib}GiB",
        # V1: the profile, in one line, and its suggestion of --kv-cache-memory.
        "torch peak memory increase: {activations:gib}GiB;",
        "non-torch forward increase memory: {non_torch:gib}GiB;",
        "total consumed (from mem_get_info): {consumed:gib}GiB;",
        "weights memory: {weights:gib}GiB.",
        f"{free}. Desired GPU memory utilization is ({{set.gpu_memory_utilization:number}}, {{requested:gib}} GiB)",
        "Actual usage is {weights:gib} GiB for weight, {activations:gib} GiB for peak activation, {non_torch:gib} "
        "GiB for non-torch memory, and {cuda_graphs:gib} GiB for CUDAGraph memory",
        "Actual usage is {consumed:gib} GiB for consumed memory (weights + non-torch), {activations:gib} GiB for "
        "peak activation, and {cuda_graphs:gib} GiB for CUDAGraph memory",
        "Current kv cache memory in use is {kv_memory:gib} GiB",
        "Available KV cache memory: {kv_memory:gib} GiB",
        "Initial free memory {gpu_free:gib} GiB, reserved {kv_memory:gib}  GiB memory for KV Cache as specified",
        "Estimated CUDA graph memory: {cuda_graphs_estimate:gib} GiB total",
        "CUDA graph pool memory: {cuda_graphs:gib} GiB (actual), {cuda_graphs_estimate:gib} GiB (estimated)",
        "Graph capturing finished in {_} took {cuda_graphs:gib} GiB",
        # What became of it.
        "# {_} blocks: {num_gpu_blocks:blocks}, # CPU blocks: {num_cpu_blocks:blocks}",
        "# GPU blocks: {num_gpu_blocks:blocks}",
        "cache_config_info with initialization after num_gpu_blocks is: {num_gpu_blocks:blocks}",
        "Overriding num_gpu_blocks={profiled_gpu_blocks:blocks} with "
        "num_gpu_blocks_override={set.num_gpu_blocks_override:whole}",
        "KV cache size: {kv_cache_tokens:tokens} tokens",
        "Maximum concurrency for {set.max_model_len:whole} tokens per request: {max_concurrency:ratio}x",
        "Setting attention block size to {attention_block_size:tokens} tokens",
        "Padding mamba page size by {mamba_padding:percent}%",
        "Add {padding_layers:count} padding layers",
        "Multiplying the GPU KV cache size by the cp_world_size {own.cp_world_size:whole}",
        # Settings that are found out.
        "Resolved architecture: {own.architecture:word}",
        "Using max model len {set.max_model_len:whole}",
        "Chunked prefill is enabled with max_num_batched_tokens={set.max_num_batched_tokens:whole}",
        "Asynchronous scheduling is {set.async_scheduling:switch}",
        "Auto-fit max_model_len: reduced from {_} to {set.max_model_len:whole} to fit",
        "Updated max_model_len to {set.max_model_len:whole}",
        "Mamba cache mode is set to '{own.mamba_cache_mode:word}'",
        "non-default args: {config:fields}",
        "args: Namespace({config:fields}",
        "Using {own.model_runner:word} Model Runner",
    ]
    refusals = [
        "To serve at least one request with the {_} max seq len ({set.max_model_len:whole}), ({kv_needed:gib} GiB KV "
        "cache is needed, which is larger than the available KV cache memory ({kv_memory:gib} GiB)",
        "The model's max seq len ({set.max_model_len:whole}) is larger than the maximum number of tokens that can be "
        "stored in KV cache ({kv_cache_tokens:tokens})",
        "No available memory for the cache blocks",
        f"{free} is less than desired GPU memory utilization "
        "({set.gpu_memory_utilization:number}, {requested:gib} GiB)",
        "Cannot auto-fit max_model_len: not enough GPU memory",
    ]
    return [
        _rule("vllm", "vLLM API server version {version:word}", "start"),
        _rule(
            "vllm",
            "Initializing a {own.engine_generation:word} LLM engine (v{version:word}) with config: "
            "{config:fields}",
            "engine",
        ),
        _rule("vllm", "Initializing an LLM engine (v{version:word}) with config: {config:fields}", "engine"),
        _rule("vllm", "Initializing an LLM engine with config: {config:fields}", "engine"),
        *(_rule("vllm", template) for template in templates),
        *(_rule("vllm", template, "refusal") for template in refusals),
        _rule(
            "vllm",
            "To serve at least one request{_}the estimated maximum model length is {estimated_max_len:tokens}",
        ),
        _rule("vllm", "Application startup complete", "ready"),
        _rule("vllm", "Starting vLLM API server", "ready"),
    ]


def _sglang() -> list[Rule]:
    templates = [
        "Load weight begin. avail mem={gpu_free:gib} GB",
        "Load weight end.{_}mem usage={weights:gib} GB",
        "Load weight end. {_}dtype=torch.{set.dtype:word}, avail mem={free_after_load:gib} GB",
        "Load weight end.{_}avail mem={free_after_load:gib} GB",
        "KV Cache is allocated.{_}#tokens: {kv_cache_tokens:tokens}, K size: {kv_k:gib} GB, V size: {kv_v:gib} GB",
        "KV Cache is allocated.{_}#tokens: {kv_cache_tokens:tokens}, KV size: {kv_memory:gib} GB",
        "KV Cache is allocated. dtype: torch.{own.pool_dtype:word}, ",
        "KV cache allocated.{_}#tokens: {kv_cache_tokens:tokens}, KV size: {kv_memory:gib} GB",
        "Using KV cache dtype: torch.{own.pool_dtype:word}",
        "Mamba Cache is allocated.{_}conv_state size: {state_conv:gib}GB, ssm_state size: {state_ssm:gib}GB",
        "max_mamba_cache_size: {state_slots:count}",
        "intermediate_ssm_state_cache size: {state_ssm_drafts:gib}GB",
        "intermediate_conv_window_cache size: {state_conv_drafts:gib}GB",
        "Memory pool end. avail mem={free_after_kv:gib} GB",
        "apture{_}raph end.{_}mem usage={cuda_graphs:gib} GB",
        "apture{_}raph end.{_}avail mem={free_after_graphs:gib} GB",
        "max_total_num_tokens={kv_cache_tokens:tokens}, ",
        "chunked_prefill_size={set.max_num_batched_tokens:whole}, max_prefill_tokens=",
        "max_running_requests={set.max_num_seqs:whole}, context_len={set.max_model_len:whole}",
        "available_gpu_mem={free_at_end:gib} GB",
    ]
    return [
        _rule("sglang", "server_args={config:fields}", "start"),
        *(_rule("sglang", template) for template in templates),
        _rule("sglang", "Not enough memory. Please try to increase --mem-fraction-static", "refusal"),
        _rule("sglang", "The server is fired up and ready to roll!", "ready"),
    ]


def _tensorrt() -> list[Rule]:
    templates = [
        "Use {weights:gib} GB for model weights",
        "Loaded engine size: {weights:wholemib} MiB",
        "Allocated {runtime_buffers:size} GPU memory for runtime buffers",
        "Allocated {decoder_buffers:size} GPU memory for decoder",
        "Allocated {activations:mib} MiB for execution context memory",
        "Memory used after loading model weights (inside torch) in memory usage profiling: {torch_after_load:gib} GiB",
        "Memory dynamically allocated during inference (inside torch) in memory usage profiling: "
        "{activations:gib} GiB",
        "Memory used outside torch (e.g., NCCL and CUDA graphs) in memory usage profiling: {non_torch:gib} GiB",
        "Peak memory during memory usage profiling (torch + non-torch): {peak:gib} GiB, "
        "available KV cache memory when calculating max tokens: {kv_planned:gib} GiB",
        "fraction is set {set.gpu_memory_utilization:number}, kv size",
        "kv size is {kv_bytes_per_token:bytes}",
        "kv size per token is {kv_bytes_per_token:bytes}",
        "device total memory {gpu_total:gib} GiB",
        "Estimated max memory in KV cache  :  {kv_planned:gib} GiB",
        "Memory usage when calculating max tokens in paged kv cache: total: {gpu_total:gib} GiB, "
        "available: {free_before_kv:gib} GiB",
        "Number of blocks in KV cache primary pool: {num_gpu_blocks:blocks}",
        "Number of blocks in KV cache secondary pool: {num_cpu_blocks:blocks}",
        "primary blocks={num_gpu_blocks:blocks}, secondary blocks={num_cpu_blocks:blocks}",
        "Number of tokens per block: {set.block_size:whole}",
        "for max tokens in paged KV cache ({kv_cache_tokens:tokens})",
        "Allocated {kv_memory:gib} GiB for max tokens",
        "Allocate {kv_memory:bytes} bytes for k/v cache",
        "Using {kv_cache_tokens:tokens} tokens in paged KV cache",
        "max_seq_len={set.max_model_len:whole}, max_num_requests={set.max_num_seqs:whole}, "
        "max_num_tokens={set.max_num_batched_tokens:whole}",
        "LLM Args:  {config:fields}",
        "TensorRT-LLM engine args: {config:fields}",
    ]
    return [
        _rule("tensorrt-llm", "TensorRT-LLM version: {version:word}", "start"),
        _rule("tensorrt-llm", "TensorRT LLM version: {version:word}", "start"),
        *(_rule("tensorrt-llm", template) for template in templates),
        # The arguments stand in the line after "LLM Args:".
        Rule(
            "tensorrt-llm",
            " tokenizer=",
            re.compile(r"^\s*(?P<f0>model=.{1,1000}? tokenizer=.*)"),
            (Field("f0", "config", "fields"),),
            "",
            "",
        ),
        _rule("tensorrt-llm", "Engine loaded and ready to serve", "ready"),
    ]


#: Where llama.cpp begins to read a model, whichever program it serves.
LOADER = "llama_model_loader: loaded meta data with"


def _llama() -> list[Rule]:
    split = "K ({own.type_k:word}):  {kv_k:mib32} MiB, V ({own.type_v:word}):  {kv_v:mib32} MiB"
    templates = [
        # The cache: today, and 2024 to 2025, and 2023.
        "cells,{_}layers,{_}/{kv_streams:count} seqs), K (",
        "size =  {kv_memory:mib32} MiB (  {kv_cells:count} cells,  {kv_layers:count} layers,{_} seqs), "
        + split,
        "KV self size  =  {kv_memory:mib32} MiB",
        f"MiB, {split}",
        "kv self size  =  {kv_memory:mib} MB",
        "kv_size = {kv_cells:count}, {_}type_k = '{own.type_k:word}', type_v = '{own.type_v:word}', "
        "n_layer = {kv_layers:count}",
        "size =  {state_memory:mib32} MiB (  {state_cells:count} cells,  {state_layers:count} layers,{_} seqs), R (",
        "{label:device} KV buffer size =  {kv_buffer:mib} MiB",
        "{label:device} RS buffer size =  {state_buffer:mib} MiB",
        "{label:device} model buffer size =  {model_buffer:mib} MiB",
        "llm_load_tensors:  {label:device} buffer size =  {model_buffer:mib} MiB",
        "{label:device} compute buffer size =  {compute_buffer:mib} MiB",
        "{label:device}  output buffer size =  {output_buffer:mib} MiB",
        "file size   =  {weights:size}",
        "model size       =  {weights:size}",
        "model size  =  {weights:size}",
        "using device {label:device} {_} - {gpu_free:wholemib} MiB free",
        "offloaded {offloaded_layers:count}/{offloadable_layers:count} layers to GPU",
        "|   -  {label:device} ({_})  |  {gpu_total:wholemib} =  {gpu_free:wholemib} + ({_} =  {model_total:wholemib} +"
        "  {context_total:wholemib} +  {compute_total:wholemib}) +",
        # Ollama's own estimate and, since its own engine, what it took.
        'msg=offload{_}memory.weights.total="{weights_estimate:size}"',
        'msg=offload{_}memory.graph.full="{compute_estimate:size}"',
        'msg="kv cache" device={label:device} size="{kv_buffer:size}"',
        'msg="model weights" device={label:device} size="{model_buffer:size}"',
        'msg="compute graph" device={label:device} size="{compute_buffer:size}"',
        "loaded meta data with {_} tensors from {own.file:path} (version",
    ]
    shape = (
        r"(?:print_info|llm_load_print_meta|llama_context|llama_new_context_with_model|llama_init_from_model)"
    )
    sizes = r"(?!kv self|KV self|graph|file size|model size)"
    named = rf"{shape}\s*:\s+{sizes}(?P<name>[a-z][\w .]{{1,30}}?)\s*= (?P<values>.{{1,4000}})"
    return [
        _rule("llama.cpp", 'msg=offload{_}memory.required.kv="{kv_estimate:size}"', "start"),
        _rule("llama.cpp", LOADER, "start"),
        _rule("llama.cpp", 'msg="Listening on {_} (version {own.ollama_version:word})', "start"),
        _rule("llama.cpp", "build: {version:whole} (", "start"),
        _rule("llama.cpp", "main: build = {version:whole} (", "start"),
        _rule("llama.cpp", "build_info: {version:word}", "start"),
        *(_rule("llama.cpp", template) for template in templates),
        *(
            Rule(
                "llama.cpp",
                key,
                re.compile(named),
                (Field("name", "shape_name", "path"), Field("values", "shape", "path")),
                "",
                "",
            )
            for key in (
                "print_info: ",
                "llm_load_print_meta: ",
                "llama_context: ",
                "llama_new_context_with_model: ",
                "llama_init_from_model: ",
            )
        ),
        _rule("llama.cpp", "creating non-SWA KV cache", "pool", cache="non-SWA"),
        _rule("llama.cpp", "creating  SWA KV cache", "pool", cache="SWA"),
        _rule("llama.cpp", "loading draft model", "draft"),
        _rule("llama.cpp", "failed to allocate buffer for kv cache", "refusal"),
    ]


#: Names in a printed configuration and what they set: a name of `kvplan.options.ServingOptions`, ``model``, or
#: ``own.X``. ``a.b`` is field b of a's value. Where several set the same, the later in this table wins.
CONFIG_NAMES: Mapping[Engine, Mapping[str, str]] = {
    "vllm": {
        "model_tag": "model",
        "model": "model",
        "served_model_name": "own.served_model_name",
        **{
            name: name
            for name in (
                *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
                *("decode_context_parallel_size", "enable_expert_parallel", "dtype", "quantization"),
                *("kv_cache_dtype", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "enable_prefix_caching"),
                *(
                    "disable_hybrid_kv_cache_manager",
                    "async_scheduling",
                    "enable_lora",
                    "max_loras",
                    "max_lora_rank",
                ),
                *("block_size", "gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override"),
                *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "enforce_eager"),
            )
        },
        "max_seq_len": "max_model_len",
        "speculative_config.method": "speculative_method",
        "speculative_config.model": "speculative_model",
        "speculative_config.num_spec_tokens": "num_speculative_tokens",
        "speculative_config.num_speculative_tokens": "num_speculative_tokens",
        "enable_chunked_prefill": "own.enable_chunked_prefill",
        "cpu_offload_gb": "own.cpu_offload_gb",
    },
    "sglang": {
        "model_path": "model",
        "served_model_name": "own.served_model_name",
        "tp_size": "tensor_parallel_size",
        "pp_size": "pipeline_parallel_size",
        "dp_size": "data_parallel_size",
        "dtype": "dtype",
        "quantization": "quantization",
        "kv_cache_dtype": "kv_cache_dtype",
        "page_size": "block_size",
        "context_length": "max_model_len",
        "max_running_requests": "max_num_seqs",
        "chunked_prefill_size": "max_num_batched_tokens",
        "disable_cuda_graph": "enforce_eager",
        "speculative_algorithm": "speculative_method",
        "speculative_draft_model_path": "speculative_model",
        "speculative_num_draft_tokens": "num_speculative_tokens",
        "mem_fraction_static": "gpu_memory_utilization",
        "ep_size": "own.ep_size",
        "enable_dp_attention": "own.enable_dp_attention",
        "disable_radix_cache": "own.disable_radix_cache",
        "swa_full_tokens_ratio": "own.swa_full_tokens_ratio",
        "max_total_tokens": "own.max_total_tokens",
    },
    "tensorrt-llm": {
        "model": "model",
        "model_path": "model",
        "tensor_parallel_size": "tensor_parallel_size",
        "pipeline_parallel_size": "pipeline_parallel_size",
        "dtype": "dtype",
        "max_seq_len": "max_model_len",
        "max_batch_size": "max_num_seqs",
        "max_num_tokens": "max_num_batched_tokens",
        "kv_cache_config.dtype": "kv_cache_dtype",
        "kv_cache_config.tokens_per_block": "block_size",
        "kv_cache_config.enable_block_reuse": "enable_prefix_caching",
        "kv_cache_config.free_gpu_memory_fraction": "gpu_memory_utilization",
    },
    "llama.cpp": {
        "n_ctx_per_seq": "max_model_len",
        "n_ctx_seq": "max_model_len",
        "n_seq_max": "max_num_seqs",
        "n_ubatch": "max_num_batched_tokens",
        "general.name": "model",
    },
}

#: Every rule.
RULES: tuple[Rule, ...] = (*_vllm(), *_sglang(), *_tensorrt(), *_llama())
