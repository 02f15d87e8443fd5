"""What the tests of kernels share: a folder for builds, and a reason to skip where there is no compiler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvplan.kernels.emulation.build import NoCompiler, Sanitizer, Source, executable, find_compiler


@pytest.fixture(scope="session", autouse=True)
def builds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Builds are made once a session, and not in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def compiler() -> None:
    """Skips without a C++ compiler."""
    try:
        find_compiler()
    except NoCompiler as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session", params=[Sanitizer.ADDRESS, Sanitizer.THREAD], ids=lambda one: one.value)
def sanitizer(request: pytest.FixtureRequest, compiler: None) -> Sanitizer:
    """Each sanitizer that the compiler has."""
    chosen: Sanitizer = request.param
    try:
        executable([Source("probe.cu", "struct P { int n; }; void probe(P) {}", ("probe",))], chosen)
    except NoCompiler as error:
        pytest.skip(str(error))
    return chosen
