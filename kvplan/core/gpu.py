"""What a GPU is, as far as memory and time depend on it."""

from __future__ import annotations

import re
from typing import NamedTuple

#: Bytes per second of a PCIe link of 16 lanes, one way, of the generation that an architecture has; 4.0 for others.
_PCIE_BYTES_PER_S = {
    "Pascal": 16 * 10**9,
    "Volta": 16 * 10**9,
    "Turing": 16 * 10**9,
    "Hopper": 64 * 10**9,
    "Blackwell": 64 * 10**9,
    "Blackwell Ultra": 64 * 10**9,
    "CDNA3": 64 * 10**9,
    "CDNA4": 64 * 10**9,
    "Gaudi3": 64 * 10**9,
}
_PCIE_4_BYTES_PER_S = 32 * 10**9


class Kernels(NamedTuple):
    """What kernels reached on a GPU: shares of the datasheet's rates, seconds beside them; None: not measured.

    `kvplan.core.step_constants.StepConstants` says what each is of.
    """

    source: str
    weights_bandwidth_share: float | None = None
    kv_bandwidth_share: float | None = None
    gemm_flops_share: float | None = None
    attention_flops_share: float | None = None
    link_bandwidth_share: float | None = None
    all_reduce_s: float | None = None
    kernel_s: float | None = None


class Gpu(NamedTuple):
    """One GPU. Unknown figures are None, never 0.

    ``memory_bytes`` is what the driver reports to a program, less than the ``marketed_gb`` (10^9
    bytes) on the box; ``memory_source`` says who reported it. ``flops_fp16`` and ``flops_fp8`` are the
    datasheet's dense tensor-core rates, without sparsity. ``interconnect_bytes_per_s`` counts both
    directions together, as datasheets do. ``unverified`` names fields that no document was seen for.
    ``kernels`` is what kernels reached on it; what was not measured is taken from the GPU ``kernels_like``.
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
    kernels: Kernels | None = None
    kernels_like: str | None = None

    @property
    def host_bytes_per_s(self) -> int:
        """The rate of its link to the host, one way, as the PCIe standard has it for 16 lanes."""
        return _PCIE_BYTES_PER_S.get(self.architecture, _PCIE_4_BYTES_PER_S)

    def to_dict(self) -> dict[str, object]:
        """The JSON form; ``kernels`` says under ``like`` whose are taken for what was not measured."""
        fields = self._asdict()
        like = fields.pop("kernels_like")
        known = self.kernels._asdict() if self.kernels else dict.fromkeys(Kernels._fields)
        return {
            **fields,
            "aliases": list(self.aliases),
            "unverified": list(self.unverified),
            "kernels": {**known, "like": like},
        }


def capability(text: str | None) -> tuple[int, int] | None:
    """A compute capability such as ``"8.9"`` as numbers that compare; None for none, and for ``gfx942`` of AMD."""
    match = re.fullmatch(r"([0-9]{1,3})\.([0-9]{1,3})", text or "")
    return (int(match[1]), int(match[2])) if match else None


def generation(compute_capability: str | None) -> int:
    """NVIDIA's generation: 9 is Hopper, which a GPU that is not known is taken for; 0 for other makers' GPUs."""
    if compute_capability is None:
        return 9
    return (capability(compute_capability) or (0, 0))[0]
