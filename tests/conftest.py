import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# A shell starts background jobs with SIGINT ignored, and processes inherit that; the tests of
# interruptions need the default handler.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Triton kernels run in an interpreter on the CPU. Triton reads this variable when it is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.fsync = lambda _: None  # takes 6 ms; only a loss of power shows its effect


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seeds torch before each test."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def float64() -> Iterator[None]:
    """Makes float64 the default type of new tensors."""
    import torch

    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Returns a folder of 22 training and 13 validation structures; only for reading."""
    import tiny_run

    return tiny_run.shared_data()


@pytest.fixture(scope="session")
def shared_run() -> Path:
    """Returns a finished is2re run of 8 steps on `shared_data`; only for reading."""
    import tiny_run

    return tiny_run.shared_run()


@pytest.fixture(scope="session")
def energy_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns 40 training structures, and splits with and without labels; only for reading."""
    import tiny_run

    from molflt.data.structures.sources import TEST_SPLITS, VAL_SPLITS

    sizes = {"train": 40, **dict(zip(VAL_SPLITS, (60, 30, 20, 9), strict=True))}
    records = {
        split: tiny_run.structures(count, i, 1000 * i, labels=split in sizes)
        for i, (split, count) in enumerate({**sizes, **dict.fromkeys(TEST_SPLITS, 5)}.items())
    }
    return tiny_run.write_splits(tmp_path_factory.mktemp("energies"), **records)


@pytest.fixture(scope="session")
def energy_runs(energy_data: Path) -> list[Path]:
    """Returns runs of 3 steps with three seeds, the last with another width; only for reading."""
    import tiny_run

    words = ["--trainer.max_steps=3", "--trainer.val_every=3", "--model.descriptors=true"]
    words += ["--model.readout=all"]
    found = [energy_data / "runs" / f"seed{seed}" for seed in range(3)]
    for seed, run in enumerate(found):
        width = f"--model.ffn_dim={32 if seed == 2 else 16}"
        assert tiny_run.start(energy_data, run, *words, f"--seed={seed}", width) == 0
    return found


@pytest.fixture(scope="session")
def potential_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the run of a potential with charges, trained on rattled argon; only for reading."""
    import tiny_run

    return tiny_run.potential_run(tmp_path_factory.mktemp("argon"))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips the pictures of energies, which take most of the time of an evaluation."""
    for name in ("parity", "rpe_profiles", "calibration"):
        monkeypatch.setattr(f"molflt.plots.{name}", lambda *_, **__: None)


@pytest.fixture
def copied_run(shared_run: Path, tmp_path: Path) -> Path:
    """Returns a copy of `shared_run` that a test may change."""
    return shutil.copytree(shared_run, tmp_path / "copied_run")
