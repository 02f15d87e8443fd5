"""What several test files use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A loaded machine is slow, not wrong: no deadline, and no complaint about slow generation.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "ci",
    deadline=None,
    max_examples=200,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real configs and facts beside the checkout; tests that need it skip without it."""
    default = Path(__file__).resolve().parents[2] / "shared"
    folder = Path(os.environ.get("KVPLAN_SHARED", default))
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}; set KVPLAN_SHARED to one with sizing/configs")
    return folder
