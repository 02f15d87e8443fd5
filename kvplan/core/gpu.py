"""What a GPU is, as far as memory and time depend on it."""

from __future__ import annotations

import re
from typing import NamedTuple


class Gpu(NamedTuple):
    """One GPU. Unknown figures are None, never 0.

    ``memory_bytes`` is what the driver reports to a program, less than the ``marketed_gb`` (10^9
    bytes) on the box; ``memory_source`` says who reported it. ``flops_fp16`` and ``flops_fp8`` are the
    datasheet's dense tensor-core rates, without sparsity. ``interconnect_bytes_per_s`` counts both
    directions together, as datasheets do. ``unverified`` names fields that no document was seen for.
    """

    name: str
    vendor: str
    architecture: str
    memory_bytes: int | None
    memory_source: str | None
    marketed_gb: int | None
    bandwidth_bytes_per_s: int | None
    flops_fp16: int | None
    flops_fp8: int | None
    interconnect_bytes_per_s: int | None
    compute_capability: str | None
    num_sms: int | None
    tdp_w: int | None
    source: str
    aliases: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """The JSON form."""
        return {**self._asdict(), "aliases": list(self.aliases), "unverified": list(self.unverified)}


def capability(text: str | None) -> tuple[int, int] | None:
    """A compute capability such as ``"8.9"`` as numbers that compare; None for none, and for ``gfx942`` of AMD."""
    match = re.fullmatch(r"([0-9]{1,3})\.([0-9]{1,3})", text or "")
    return (int(match[1]), int(match[2])) if match else None


def generation(compute_capability: str | None) -> int:
    """NVIDIA's generation: 9 is Hopper, which a GPU that is not known is taken for; 0 for other makers' GPUs."""
    if compute_capability is None:
        return 9
    return (capability(compute_capability) or (0, 0))[0]
