"""Settings and fixtures of all tests."""

import shutil
import signal
from pathlib import Path

import pytest

# A shell starts background jobs with SIGINT ignored, and processes inherit that; the tests of
# interruptions need the default handler.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 22 training and 13 validation structures; tests only read it."""
    from tiny_run import write_data

    return write_data(tmp_path_factory.mktemp("shared_data"))


@pytest.fixture(scope="session")
def shared_run(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished is2re run of 8 steps on `shared_data`, validated every 4; tests only read it."""
    from tiny_run import start

    run = tmp_path_factory.mktemp("shared_run") / "run"
    words = ["--trainer.max_steps=8", "--trainer.val_every=4", "--trainer.log_every=2"]
    assert start(shared_data, run, *words) == 0
    return run


@pytest.fixture
def copied_run(shared_run: Path, tmp_path: Path) -> Path:
    """A copy of `shared_run` that a test may change."""
    return shutil.copytree(shared_run, tmp_path / "copied_run")
