"""Settings and fixtures of all tests."""

import shutil
import signal
from pathlib import Path

import pytest

# A shell starts background jobs with SIGINT ignored, and processes inherit that; the tests of
# interruptions need the default handler.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """22 training and 13 validation structures; tests only read them."""
    import tiny_run

    return tiny_run.shared_data()


@pytest.fixture(scope="session")
def shared_run() -> Path:
    """A finished is2re run of 8 steps on `shared_data`, validated every 4; tests only read it."""
    import tiny_run

    return tiny_run.shared_run()


@pytest.fixture
def copied_run(shared_run: Path, tmp_path: Path) -> Path:
    """A copy of `shared_run` that a test may change."""
    return shutil.copytree(shared_run, tmp_path / "copied_run")
