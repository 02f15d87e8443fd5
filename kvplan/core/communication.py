"""How long the ranks of a group take to add up their parts of a result."""

from __future__ import annotations

from typing import NamedTuple


class Link(NamedTuple):
    """How the GPUs of a group reach each other; ``bytes_per_s`` is one GPU's rate one way.

    With ``is_switched`` each reaches all others at that rate (NVLink, Infinity Fabric), so that a small message can be
    sent to everybody at once; else they share a bus (PCIe) and pass parts around a ring.
    """

    bytes_per_s: int
    is_switched: bool


class AllReduce(NamedTuple):
    """What an all-reduce comes to: rounds in which everybody waits for everybody, and bytes that each rank sends."""

    rounds: int
    sent_bytes: float

    def seconds(self, link: Link, round_s: float, bandwidth_share: float) -> float:
        """The rounds one after another, and the bytes at a share of the link's rate."""
        return self.rounds * round_s + self.sent_bytes / (link.bytes_per_s * bandwidth_share)


def all_reduce(
    message_bytes: float, ranks: int, link: Link, round_s: float, bandwidth_share: float
) -> AllReduce:
    """The faster way to add up a message of each of ``ranks`` ranks.

    One-shot: one round, in which each rank sends the whole message to all others. Two-shot over a switch: two rounds,
    in which parts are added up and then handed out, 2 (n - 1) / n of the message. Around a ring the same bytes take
    2 (n - 1) rounds (Patarasuk and Yuan 2009). vLLM 0.33 chooses between the first two by size
    (csrc/custom_all_reduce.cuh) and leaves what has no switch to NCCL.
    """
    if ranks == 1:
        return AllReduce(0, 0.0)
    parts = 2 * (ranks - 1) / ranks * message_bytes
    if not link.is_switched:
        return AllReduce(2 * (ranks - 1), parts)
    ways = AllReduce(1, (ranks - 1) * message_bytes), AllReduce(2, parts)
    return min(ways, key=lambda way: way.seconds(link, round_s, bandwidth_share))
