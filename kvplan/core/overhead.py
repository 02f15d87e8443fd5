"""What vLLM measures when it starts: memory on each GPU that is neither weights nor KV cache.

The engine runs a forward pass of ``max_num_batched_tokens`` tokens and samples for ``max_num_seqs`` sequences, and
takes the peak (v1/worker/gpu_worker.py ``determine_available_memory``, gpu_model_runner.py ``profile_run``). Which
tensors are alive at that peak follows from the shape of the model and the version, so activations are counted, not
fitted. What the driver, NCCL and CUDA graphs take cannot be counted: those few figures are read off start-up logs.
docs/memory.md gives each part and its error; benchmarks/budget_against_logs.py compares with logs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from kvplan.core.deployment import Margin
from kvplan.core.gpu import capability
from kvplan.core.kv_cache import STATES
from kvplan.core.model import ModelSpec
from kvplan.core.vllm_rules import VllmRules
from kvplan.core.weights import DTYPE_BYTES
from kvplan.errors import InputError

_MIB = 1 << 20
_GIB = 1 << 30

#: Bytes that the sampler holds for each sequence and vocabulary entry, beside the logits in the model's dtype
#: (v1/sample/ops/topk_topp_sampler.py). Sorting, until 0.16: logits, sorted values and indices in 4 + 4 + 8 bytes, and
#: 20.2 of PyTorch's segmented sort, read off nine logs of 0.7 to 0.16, which agree within 0.1. A Triton kernel, from
#: 0.17: logits, probabilities and noise in 4 bytes each, and its buffer. FlashInfer, from 0.21: logits, masked logits
#: and probabilities in 4 bytes each.
_SORTING_TENTHS = 362
_THREE_COPIES = 12
_TRITON_FROM_ROWS = 8

#: cuBLAS workspace that PyTorch keeps: 32 MiB from Hopper on, 8.125 MiB before (ATen/cuda/CUDABlas.cpp).
_CUBLAS_HOPPER = 32 * _MIB
_CUBLAS_OLDER = 8 * _MIB + 128 * 1024

#: Growth of memory outside PyTorch on one GPU: kernels, libraries. From logs: H100 0.13 GiB (0.10 to 0.17) and
#: 0.25 (0.18 and 0.19), A100 and consumer GPUs 0.02 to 0.05 (0.7 to 0.10) and 0.13 (0.31).
_CONTEXT = {True: 13 * _GIB // 100, False: 5 * _GIB // 100}
_CONTEXT_FROM_0_18 = {True: 25 * _GIB // 100, False: 13 * _GIB // 100}

#: NCCL and the engine's own all-reduce among two ranks of tensor parallelism: 0.41 GiB on H100 before 0.18; among
#: more, where NVLink reduces, 1.7 (0.10, 4 ranks) to 2.4 (0.7, 8 ranks and 2 stages).
_ALL_REDUCE = 41 * _GIB // 100
_NVLINK_REDUCE = 125 * _GIB // 100
#: Buffers of FlashInfer's fused all-reduce, made from 0.18 on Hopper and datacentre Blackwell without pipeline
#: stages (config/vllm.py ``enable_allreduce_rms_fusion``): the growth at 2 and 4 ranks is 1.82
#: and 1.92 GiB in all.
_FUSED_ALL_REDUCE = 145 * _GIB // 100
_PER_DOUBLING = 5 * _GIB // 100
_PIPELINE = 20 * _GIB // 100

#: A captured graph costs the driver this much for each layer, and the first one a base with its buffers: fitted to
#: 27 estimates that 0.19 printed on H100, median error 0.10 GiB. Routed experts are more kernels.
_GRAPH_PER_LAYER = 140 * 1024
_GRAPH_BASE = 25 * _GIB // 100
_GRAPH_LARGEST = 512

#: Pixels behind one token of an image: 28 x 28, as for patches of 14 merged two by two (Qwen2-VL and later).
_PIXELS_PER_TOKEN = 28 * 28


@dataclass(frozen=True, slots=True)
class Overhead:
    """Bytes on each GPU beside weights and KV: an estimate, ``low`` to ``high`` for the sum of the first three.

    ``runtime`` includes ``communication``. ``uncounted_graphs`` are graphs that this version does not take off the
    budget: they come out of what ``gpu_memory_utilization`` leaves free.
    """

    activations: int
    cuda_graphs: int
    runtime: int
    low: int
    high: int
    communication: int = 0
    uncounted_graphs: int = 0

    def total(self, margin: Margin) -> int:
        """The sum at that end of the range."""
        if margin == "low":
            return self.low
        return self.high if margin == "high" else self.activations + self.cuda_graphs + self.runtime


def estimate_overhead(
    spec: ModelSpec,
    *,
    version: str = "0.33",
    max_num_batched_tokens: int,
    max_num_seqs: int,
    dtype: str | None = None,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    enforce_eager: bool = False,
    compute_capability: str | None = "9.0",
    num_sms: int | None = 132,
    multimodal: bool | None = None,
) -> Overhead:
    """Memory that the engine measures at its start, on each GPU of the last pipeline stage, in bytes.

    ``version`` is vLLM's, such as ``0.19`` or ``0.19.1``; ``dtype`` that of the model unless given. ``multimodal``:
    inputs other than text are profiled too; None: as the architecture's name says. ``compute_capability`` and
    ``num_sms`` are the GPU's; None is taken for an older one. Raises `InputError` for a version that is not one.
    """
    release = _release(version)
    number = capability(compute_capability) or (0, 0)
    if multimodal is None:
        multimodal = spec.architecture.endswith("ForConditionalGeneration")
    run = _ProfileRun(
        spec=spec,
        release=release,
        tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        width=DTYPE_BYTES[dtype or spec.dtype],
        ranks=tensor_parallel_size,
        multimodal=multimodal,
        v2=_runs_on_v2(spec, release),
        modern=number >= (9, 0),
        num_sms=num_sms,
    )
    activations = _activation_bytes(run)
    graphs = 0 if enforce_eager else _graph_bytes(spec, run.sequences, run.tokens)
    # 0.21 switched on VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS (envs.py); the second runner estimated 0 until 0.28.
    counted = release >= (0, 21) and not (run.v2 and release < (0, 28))
    communication = _communication_bytes(
        release, tensor_parallel_size, pipeline_parallel_size, fused=run.modern and number < (12, 0)
    )
    runtime = (_CONTEXT_FROM_0_18 if release >= (0, 18) else _CONTEXT)[run.modern] + communication
    cuda_graphs = graphs if counted else 0
    total = activations + cuda_graphs + runtime
    # Activations are counted and miss by a few per cent; graphs and runtime were seen wrong by half.
    low = activations * 92 // 100 + cuda_graphs * 3 // 10 + runtime // 2
    high = activations * 108 // 100 + cuda_graphs * 18 // 10 + runtime * 15 // 10 + _GIB // 5
    if multimodal:
        # A tower may work on more than it hands over: a quarter more of the forward pass.
        high += max(run.hidden_bytes, _forward_bytes(run) // 4)
    return Overhead(
        activations=activations,
        cuda_graphs=cuda_graphs,
        runtime=runtime,
        low=min(low, total),
        high=max(high, total),
        communication=communication,
        uncounted_graphs=graphs - cuda_graphs,
    )


class _ProfileRun(NamedTuple):
    """The pass over ``tokens`` tokens that the engine measures; ``width`` is the bytes of an activation.

    ``v2``: on the second model runner. ``modern``: on Hopper or later.
    """

    spec: ModelSpec
    release: tuple[int, int]
    tokens: int
    max_num_seqs: int
    width: int
    ranks: int
    multimodal: bool
    v2: bool
    modern: bool
    num_sms: int | None

    @property
    def sequences(self) -> int:
        """Sequences that are sampled for."""
        return min(self.max_num_seqs, self.tokens)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden states of all tokens."""
        return self.tokens * self.spec.hidden_size * self.width

    @property
    def keeps_expert_workspace(self) -> bool:
        """Whether the workspace of the modular kernel stays (model_executor/layers/fused_moe, workspace_shapes).

        The 4-bit experts of gpt-oss run without it.
        """
        return self.release >= (0, 13) and self.spec.weights.quantization != "mxfp4"


def _activation_bytes(run: _ProfileRun) -> int:
    """What stays of the pass, and the larger of its two peaks: in the layers, and when it samples."""
    spec, release = run.spec, run.release
    kept = _CUBLAS_HOPPER if run.modern else _CUBLAS_OLDER
    if run.multimodal and not (run.v2 and release < (0, 28)):
        kept += run.hidden_bytes + run.tokens * _PIXELS_PER_TOKEN * 3 * run.width
    if run.keeps_expert_workspace:
        kept += _expert_bytes(run)
    # The hidden states of all tokens, those to sample from, and a random copy of these.
    states = run.hidden_bytes + 2 * run.sequences * spec.hidden_size * run.width
    activations = kept + max(_forward_bytes(run), states + _sampler_bytes(run))
    if run.v2 and release >= (0, 27):
        # Counts and mask for penalties stay on the GPU (v1/worker/gpu/sample/penalties.py). Before, what was kept
        # beside the weights was not seen; now all is that is gone from free memory (utils/mem_utils.py).
        activations += run.max_num_seqs * (4 * spec.vocab_size + -(-spec.vocab_size // 32) * 4)
    return activations


def _runs_on_v2(spec: ModelSpec, release: tuple[int, int]) -> bool:
    """Whether the version's default for this model is the second model runner; a draft is left out of account."""
    return VllmRules(release).runner_v2(
        spec.architecture,
        None,
        has_states=any(isinstance(item.cache, STATES) for item in spec.layers),
        has_experts=spec.has_experts,
    )


def num_capture_sizes(largest: int) -> int:
    """How many batch sizes up to ``largest`` are captured: 1, 2, 4, then every 8th below 256 and every 16th.

    vLLM 0.19 to 0.33, config/vllm.py ``_set_cudagraph_sizes``.

    >>> num_capture_sizes(512)
    51
    """
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    return sum(size <= largest for size in sizes)


def _forward_bytes(run: _ProfileRun) -> int:
    """Peak of one layer: four copies of the hidden states beside the halves of a gated MLP and their product.

    The residual stream, the attention's output and the norm's live while the MLP runs; its halves and product are
    3 x its width, 2 x where it has no gate. Attention may be the larger: queries, keys and values, once before and once
    after the rotation, and its output. The workspaces of experts live with them unless they stay.
    """
    spec = run.spec
    heads = spec.num_heads * spec.head_dim
    kv = 2 * spec.num_kv_heads * spec.head_dim
    attention = (3 * heads + 2 * kv) // run.ranks
    mlp = spec.mlp
    mlp_wide = 4 * spec.hidden_size if mlp is None else mlp.width
    copies = 3 if mlp is None or mlp.gated else 2
    layer = run.tokens * run.width * (4 * spec.hidden_size + max(attention, copies * mlp_wide // run.ranks))
    return layer if run.keeps_expert_workspace else layer + _expert_bytes(run)


def _expert_bytes(run: _ProfileRun) -> int:
    """Workspaces of the routed experts (fused_moe.py ``workspace_shapes``): 0 without experts.

    For each token and each expert that it uses max(product, hidden) and max(halves, hidden) elements; without a gate
    there is no second half.
    """
    mlp, hidden = run.spec.mlp, run.spec.hidden_size
    if mlp is None or not mlp.expert_width:
        return 0
    product = mlp.expert_width // run.ranks
    elements = max(product, hidden) + max((2 if mlp.gated else 1) * product, hidden)
    return run.tokens * mlp.experts_per_token * elements * run.width


def _sampler_bytes(run: _ProfileRun) -> int:
    """Logits and what the sampler makes of them."""
    rows, vocab, release = run.sequences, run.spec.vocab_size, run.release
    entries = rows * vocab
    logits = entries * run.width
    if run.v2 and release < (0, 28):
        return logits  # samples without top-k and top-p in the profile run
    if release >= (0, 21):
        return logits + entries * _THREE_COPIES
    if release < (0, 17) or rows < _TRITON_FROM_ROWS:
        return logits + entries * _SORTING_TENTHS // 10
    # The kernel's buffer has a row for each multiprocessor that has work.
    most = run.num_sms or rows
    buffer_rows = min(_power_of_2(min(most, rows)), most)
    return logits + entries * _THREE_COPIES + buffer_rows * vocab * 4


def _graph_bytes(spec: ModelSpec, sequences: int, tokens: int) -> int:
    """Graphs of whole decode steps, and of steps in pieces between the attention layers."""
    largest = min(2 * sequences, _GRAPH_LARGEST, tokens)
    graphs = num_capture_sizes(largest) + num_capture_sizes(min(sequences, largest))
    per_layer = _GRAPH_PER_LAYER
    if spec.has_experts:
        per_layer += per_layer // 3
    return _GRAPH_BASE + graphs * spec.num_layers * per_layer


def _communication_bytes(release: tuple[int, int], ranks: int, stages: int, *, fused: bool) -> int:
    total = _PIPELINE if stages > 1 else 0
    if ranks == 1:
        return total
    total += _ALL_REDUCE + _PER_DOUBLING * ((ranks - 1).bit_length() - 1)
    if fused and release >= (0, 18) and stages == 1:
        total += _FUSED_ALL_REDUCE
    elif fused and ranks > 2:
        total += _NVLINK_REDUCE
    return total


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _release(version: str) -> tuple[int, int]:
    match = re.match(r"v?([0-9]{1,4})\.([0-9]{1,4})(?![0-9])", version)
    if match is None:
        raise InputError(
            f'"{version[:40]}" is not a version',
            where="vLLM version",
            hint="write one such as 0.19 or 0.33.0",
        )
    return int(match.group(1)), int(match.group(2))
