"""What several test files use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real configs and facts beside the checkout; tests that need it skip without it."""
    default = Path(__file__).resolve().parents[2] / "shared"
    folder = Path(os.environ.get("KVPLAN_SHARED", default))
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}; set KVPLAN_SHARED to one with sizing/configs")
    return folder
