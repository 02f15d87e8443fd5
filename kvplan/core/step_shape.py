"""What one rank does in a step, as far as its time depends on it, and what its GPU could do: whole numbers all.

`kvplan.step_time` makes them of a deployment, `kvplan.core.cost` makes times of them.
"""

from __future__ import annotations

from typing import NamedTuple

from kvplan.core.communication import Link
from kvplan.core.engine import StepWork


class GpuRates(NamedTuple):
    """What one GPU's datasheet promises: dense FLOP/s with 16-bit and with 8-bit operands, bytes/s of its links."""

    bandwidth_bytes_per_s: int
    flops_16bit: int
    flops_8bit: int
    link: Link
    host_bytes_per_s: int = 1


class Matrices(NamedTuple):
    """Matrices that every token (or every sampled one) is multiplied with, on one rank, all layers together.

    ``flops`` and ``flops_8bit`` are those of one token with 16-bit and with 8-bit operands.
    """

    read_bytes: int = 0
    flops: int = 0
    flops_8bit: int = 0


class Experts(NamedTuple):
    """Routed experts of equal layers, all layers together, on one rank.

    The rank holds ``local`` of each layer's ``total`` experts (or a slice of each); a token uses ``used`` of the total.
    ``read_bytes`` are those of one expert on the rank, summed over the layers; FLOPs are those of one token in one
    expert, over the layers too. ``replicas`` is how many data-parallel replicas send tokens here.
    """

    total: int
    local: int
    used: int
    read_bytes: int
    flops: int = 0
    flops_8bit: int = 0
    replicas: int = 1

    def distinct(self, tokens: int) -> float:
        """Experts of a layer that so many tokens are expected to use, if each picks its own at random."""
        return self.local * (1.0 - (1.0 - self.used / self.total) ** (tokens * self.replicas))


class Attention(NamedTuple):
    """Layers of one kind on one rank, all together.

    ``context_bytes`` are read for each token that is attended to, at most ``window`` of them, and written for each new
    one; ``pair_flops`` are those of one token's attention to one other while decoding, ``chunk_pair_flops`` in a chunk
    of a prompt. ``chunk_token_bytes`` are a token's query, key, value and result in a chunk. ``sequence_bytes`` are
    read and written in each step for each sequence, whatever its length (states).
    """

    context_bytes: int = 0
    pair_flops: int = 0
    chunk_pair_flops: int = 0
    chunk_token_bytes: int = 0
    window: int | None = None
    sequence_bytes: int = 0


class Reductions(NamedTuple):
    """So many all-reduces in a step, among ``ranks`` ranks, to which each token adds ``token_bytes``."""

    number: int
    ranks: int
    token_bytes: int


class StageShape(NamedTuple):
    """What one rank of one pipeline stage reads, computes and sends.

    ``kernels`` run in each step. For each token ``activation_bytes`` are moved between matrix products and
    ``sent_bytes`` go to the next stage.
    """

    kernels: int
    dense: Matrices = Matrices()
    head: Matrices = Matrices()
    experts: tuple[Experts, ...] = ()
    attention: tuple[Attention, ...] = ()
    activation_bytes: int = 0
    reductions: tuple[Reductions, ...] = ()
    sent_bytes: int = 0


def read_tokens(before: int, count: int, window: int | None) -> int:
    """Tokens whose keys and values a chunk reads."""
    return before + count if window is None else min(before, window) + count


def pairs_of(before: int, count: int, window: int | None) -> int:
    """Pairs of a token of a chunk and one that it attends to, itself included."""
    if window is None or before + count <= window:
        return count * before + count * (count + 1) // 2
    growing = max(0, window - before)  # tokens whose window is not full
    return growing * before + growing * (growing + 1) // 2 + (count - growing) * window


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
        tokens, pairs = work.decodes, work.decode_context
        for before, count in work.chunks:
            tokens += count
            pairs += pairs_of(before, count, None)
        return self.per_token * tokens + self.per_logits * work.sampled + self.per_pair * pairs
