"""The catalogues and workloads that kvplan ships, and where they lie."""

from __future__ import annotations

from pathlib import Path

_PACKAGED = Path(__file__).resolve().parent


def resource(name: str) -> Path:
    """The path of a shipped file or folder, such as ``models.yaml`` or ``workloads``.

    A wheel carries them in ``kvplan/data``. In a checkout those that users edit lie at the top level,
    beside pyproject.toml, and are found there. The path need not exist.
    """
    packaged = _PACKAGED / name
    checkout = _PACKAGED.parent.parent
    if not packaged.exists() and (checkout / "pyproject.toml").is_file():
        return checkout / name
    return packaged
