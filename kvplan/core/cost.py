"""How long one engine step takes: an uncalibrated roofline, in whole picoseconds.

Coefficients are rounded once to whole picoseconds, so that sums over steps are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvplan.core.engine import StepWork
from kvplan.core.request import PICOSECONDS

_FOREVER = 1 << 62

#: Share of the datasheet bandwidth that decode steps reach, and time of a step for each layer beside its
#: bytes and FLOPs: unfitted defaults. Against published token gaps of Qwen3-14B on an H100 (vLLM 0.23) they
#: are off by 0.9 % (median), against Llama-2-7B to 70B under load by 5.0 % (median) and 20 % (p95).
BANDWIDTH_SHARE_PERCENT = 80
LAYER_OVERHEAD_PS = 20 * 10**6

#: Share of the datasheet's dense FLOP/s that large matrix products reach: bf16 GEMMs measured on H100 (BLIS,
#: benchmark data of inference-sim) lie between 0.6 and 0.75 for 4,096 tokens and more.
FLOPS_SHARE_PERCENT = 65

#: Share of the host link's rate that copies from and to pinned memory reach: an unfitted default.
HOST_LINK_SHARE_PERCENT = 80


@dataclass(frozen=True, slots=True)
class Roofline:
    """Step time = max(bytes / bandwidth, FLOPs / peak) + a fixed overhead, per rank.

    Left out: communication between ranks, sampling, CPU time. Experts count as all read in each step, and float32
    is priced with the 16-bit rate.
    """

    weights_ps: int
    kv_token_ps: int
    token_ps: int
    logits_ps: int
    attention_ps: int
    overhead_ps: int
    copy_block_ps: int = 0
    swap_block_ps: int = 0

    @classmethod
    def from_rates(
        cls,
        *,
        weight_bytes: int,
        kv_bytes_per_token: int,
        flops: Flops,
        num_layers: int,
        bandwidth_bytes_per_s: int,
        flops_per_s: int,
        block_bytes: int = 0,
        host_bytes_per_s: int = 1,
    ) -> Roofline:
        """Coefficients from what one rank reads and computes and what its GPU can do.

        A copied block is read and written in the GPU's memory, a swapped one goes over the link to the host, at
        ``host_bytes_per_s`` one way.
        """
        bandwidth = bandwidth_bytes_per_s * BANDWIDTH_SHARE_PERCENT
        rate = flops_per_s * FLOPS_SHARE_PERCENT
        return cls(
            weights_ps=100 * weight_bytes * PICOSECONDS // bandwidth,
            kv_token_ps=100 * kv_bytes_per_token * PICOSECONDS // bandwidth,
            token_ps=100 * flops.per_token * PICOSECONDS // rate,
            logits_ps=100 * flops.per_logits * PICOSECONDS // rate,
            attention_ps=100 * flops.per_pair * PICOSECONDS // rate,
            overhead_ps=num_layers * LAYER_OVERHEAD_PS,
            copy_block_ps=100 * 2 * block_bytes * PICOSECONDS // bandwidth,
            swap_block_ps=100 * block_bytes * PICOSECONDS // (host_bytes_per_s * HOST_LINK_SHARE_PERCENT),
        )

    def decode(self, sequences: int, context: int) -> tuple[int, int, int]:
        """``(first, growth, valid)`` of steps in which only ``sequences`` decode, ``context`` tokens in the first.

        Step j takes ``first + growth * j`` picoseconds, for j below ``valid``: then the other side of the
        maximum takes over. Each step adds a token to every context.
        """
        memory = self.weights_ps + self.kv_token_ps * context
        compute = (self.token_ps + self.logits_ps) * sequences + self.attention_ps * context
        memory_growth, compute_growth = self.kv_token_ps * sequences, self.attention_ps * sequences
        if memory >= compute:
            first, growth, lead = memory, memory_growth, memory - compute
            closing = compute_growth - memory_growth
        else:
            first, growth, lead = compute, compute_growth, compute - memory
            closing = memory_growth - compute_growth
        valid = _FOREVER if closing <= 0 else lead // closing + 1
        return first + self.overhead_ps, growth, valid

    def step_ps(self, work: StepWork) -> int:
        """Picoseconds of a step; one that computes nothing costs the overhead alone.

        Blocks are copied and swapped before it computes, one after the other.
        """
        tokens, pairs = _tokens_and_pairs(work)
        moved = work.copied_blocks * self.copy_block_ps
        moved += (work.swapped_out_blocks + work.swapped_in_blocks) * self.swap_block_ps
        if not tokens:
            return self.overhead_ps + moved
        read = work.decode_context
        for before, count in work.chunks:
            read += before + count
        memory = self.weights_ps + self.kv_token_ps * read
        compute = self.token_ps * tokens + self.logits_ps * work.sampled + self.attention_ps * pairs
        return max(memory, compute) + self.overhead_ps + moved


class Flops(NamedTuple):
    """Floating-point operations of one rank.

    Of a token's matrix products without the vocabulary's, of a sequence that samples, and of a pair: one token's
    attention to one token of its context.
    """

    per_token: int
    per_logits: int
    per_pair: int

    def of(self, work: StepWork) -> int:
        """Those of a step; as a price, it has the clock count them."""
        tokens, pairs = _tokens_and_pairs(work)
        return self.per_token * tokens + self.per_logits * work.sampled + self.per_pair * pairs


def _tokens_and_pairs(work: StepWork) -> tuple[int, int]:
    """Tokens computed, and pairs of one of them with a token that it attends to."""
    tokens, pairs = work.decodes, work.decode_context
    for before, count in work.chunks:
        tokens += count
        pairs += count * before + count * (count + 1) // 2
    return tokens, pairs


def constant(ticks: int) -> Callable[[StepWork], int]:
    """A price that is the same for every step."""
    return lambda _work: ticks


def constant_decode(ticks: int) -> Callable[[int, int], tuple[int, int, int]]:
    """The same price in the form of `Roofline.decode`."""
    return lambda _sequences, _context: (ticks, 0, _FOREVER)
