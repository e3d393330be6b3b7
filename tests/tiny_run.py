"""Small data and small models that train in seconds, and helpers for tests of runs."""

import csv
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import contextmanager, redirect_stdout
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import add_adsorbate, bulk, fcc111
from ase.calculators.lj import LennardJones
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms
from ase.db import connect
from ase.io import write
from lightning.pytorch.utilities import rank_zero_only
from safetensors import safe_open
from safetensors.torch import load_file
from torch_geometric.data import Batch, Data

from molflt.commands.cli import main
from molflt.commands.train import train
from molflt.data.structures import open_dataset
from molflt.data.structures.records import make_record
from molflt.data.structures.store import write_store
from molflt.graph import Potential
from molflt.training import run_folder
from molflt.training.checkpoint import load_run
from molflt.training.loop import _LightningTask
from molflt.training.start import build_parser

SMALL = [
    "--model.dim=16",
    "--model.heads=2",
    "--model.layers=1",
    "--model.ffn_dim=16",
    "--model.num_features=8",
    "--model.mixing=linear",
    "--model.position=spectral",
    "--model.position_options.num_nodes=4",
    "--model.position_options.num_gaussians=4",
    "--data.batch_size=4",
    "--task.warmup_steps=2",
    "--trainer.accelerator=cpu",
]


_draw_curve, _curves = run_folder.draw_curve, {}


def _curve(run: Path, file: Path, metrics) -> None:
    """Draws one curve per task and copies it: curves take most of the time of a tiny run."""
    if (names := tuple(metrics)) not in _curves:
        _draw_curve(run, file, metrics)
        _curves[names] = file.read_bytes()
    file.write_bytes(_curves[names])


run_folder.draw_curve = _curve


def structures(count: int, seed: int = 0, first_sid: int = 0, labels: bool = True):
    """Yields random slabs of 6 to 14 atoms; energies depend on elements and distances."""
    draw = np.random.default_rng(seed)
    for i in range(count):
        n = int(draw.integers(6, 15))
        pos = draw.uniform(0, 5, (n, 3))
        numbers = draw.choice([1, 8, 29, 78], n)
        tags = np.array([0, 0, 1, 1] + [2] * (n - 4))
        nearest = np.linalg.norm(pos[:, None] - pos[None], axis=-1)[~np.eye(n, dtype=bool)].min()
        yield make_record(
            pos=pos,
            atomic_numbers=numbers,
            cell=np.diag([8.0, 8.0, 20.0]),
            tags=tags,
            fixed=tags == 0,
            sid=first_sid + i,
            y_init=0.0 if labels else None,
            y_relaxed=float(nearest - 0.02 * numbers.mean() - 1) if labels else None,
            pos_relaxed=pos + 0.2 * (pos.mean(axis=0) - pos) if labels else None,
        )


def argon(count: int, seed: int) -> list[Atoms]:
    """Returns rattled argon with Lennard-Jones labels; one structure lacks forces."""
    draw, frames = np.random.default_rng(seed), []
    for i in range(count):
        atoms = bulk("Ar", "fcc", 5.2, cubic=True)
        atoms.pbc = i % 2 == 0
        atoms.positions += draw.normal(scale=0.2, size=atoms.positions.shape)
        atoms.calc = LennardJones(sigma=3.4, epsilon=0.5, rc=8.0)
        labels = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
        if i % 2 == 0:
            labels["stress"] = atoms.get_stress()
        if i == 1:
            del labels["forces"]
        atoms.calc = SinglePointCalculator(atoms, **labels)
        frames.append(atoms)
    return frames


def on_slab(adsorbate: str = "O", metal: str = "Cu", layers: int = 3) -> Atoms:
    """Returns an atom on a slab whose deepest layer is fixed and subsurface."""
    atoms = fcc111(metal, (2, 2, layers), vacuum=8.0, periodic=True)
    add_adsorbate(atoms, adsorbate, height=1.2, position="fcc")
    atoms.set_tags([0] * 4 + [1] * (4 * layers - 4) + [2])
    atoms.set_constraint(FixAtoms(range(4)))
    return atoms


def write_frames(path: Path, frames: list[Atoms]) -> Path:
    """Writes structures with their `info`; .db and .json are databases of ASE."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in (".db", ".json"):
        with connect(path) as database:
            for atoms in frames:
                database.write(atoms, **atoms.info)
    else:
        write(path, frames)
    return path


def write_points(root: Path) -> Path:
    root.mkdir(parents=True)
    for seed, split in enumerate(("train", "val_id")):
        write(root / f"{split}.extxyz", argon(6, seed))
    return root


def potential_run(root: Path) -> Path:
    for seed, (split, count) in enumerate({"train": 24, "val_id": 8}.items()):
        frames = argon(count, seed)
        for atoms in frames:
            atoms.set_tags([4, 3, 2, 1])  # tags of ase.build, which potentials ignore
        write(root / f"{split}.traj", frames)
    words = "--model.radial_basis=8 --model.long_range 1 6 --model.long_range_channels=2 "
    words += "--trainer.max_steps=16 --trainer.val_every=8 --task.warmup_steps=3 --task.lr=0.02"
    train_potential(root, root / "run", *words.split(), "--data.batch_size=6")
    return root / "run"


def train_potential(data: Path, run: Path, *more: str) -> None:
    words = "--model.dim=16 --model.heads=2 --model.layers=1 --model.ffn_dim=16 "
    words += f"--model.num_features=8 --trainer.accelerator=cpu --data.root={data} --run={run}"
    assert main(["train", "--recipe=potential", *words.split(), *more]) == 0


def random_potential(**options) -> Potential:
    """Returns a small potential with random weights that knows all elements."""
    torch.manual_seed(0)
    sizes = {"dim": 16, "heads": 2, "layers": 1, "ffn_dim": 16, "num_features": 8}
    made = Potential(**{**sizes, "radial_basis": 4, **options})
    made.trained_elements[:] = True
    return made


def write_splits(root: Path, **splits: Iterable[Data]) -> Path:
    """Writes a compact store for each split, and returns the folder."""
    for split, records in splits.items():
        write_store(root / f"{split}.safetensors", records)
    return root


def write_data(root: Path, train: int = 22, val: int = 13) -> Path:
    return write_splits(root, train=structures(train), val_id=structures(val, 1, 1000))


@cache
def _shared() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="molflt-tests-")


def shared_folder(name: str) -> Path:
    """Makes a folder that is removed when the process ends."""
    folder = Path(_shared().name) / name
    folder.mkdir()
    return folder


@cache
def shared_data() -> Path:
    """Returns a folder of 22 training and 13 validation structures; only for reading."""
    return write_data(shared_folder("data"))


@cache
def shared_run() -> Path:
    """Returns a finished is2re run of 8 steps on `shared_data`; only for reading.

    Its output is in the file `log` in the parent folder.
    """
    run = shared_folder("is2re") / "run"
    words = ["--trainer.max_steps=8", "--trainer.val_every=4", "--trainer.log_every=2"]
    with open(run.with_name("log"), "w") as file, redirect_stdout(file):
        assert start(shared_data(), run, *words) == 0
    return run


def arguments(data: Path, run: Path, *more: str) -> list[str]:
    return [*SMALL, f"--data.root={data}", f"--run={run}", *more]


plain_parser = cache(build_parser)  # takes 0.1 s


def start(data: Path, run: Path, *more: str) -> int:
    words = arguments(data, run, *more)
    changed = any(word.startswith(("--config", "--init", "--recipe")) for word in words)
    parser = build_parser(words) if changed else plain_parser()
    return train(**parser.parse_args(words).as_dict())


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}


def forked(*words: object, **environment: object) -> BaseProcess:
    """Starts a command in a copy of this process, which does not have to import anything."""

    def command() -> None:
        os.environ.update({name: str(value) for name, value in environment.items()})
        rank_zero_only.rank = int(environment.get("LOCAL_RANK", 0))
        sys.exit(main([*map(str, words)]))

    running = multiprocessing.get_context("fork").Process(target=command)
    running.start()
    return running


def python(*words: object, cwd: Path | None = None, status: int = 0, **environment: str):
    """Runs Python in another process, and returns its output and errors as text."""
    options = {"cwd": cwd, "env": ENVIRONMENT | environment, "timeout": 3000}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == status, done.stderr
    return done


def printed(capsys, *words: object, status: int = 0):
    """Runs a command, and returns what it writes to stdout and stderr, as `out` and `err`."""
    capsys.readouterr()
    assert main([*map(str, words)]) == status
    return capsys.readouterr()


def inspected(capsys, *words: object) -> dict:
    """Returns the object that ``molflt data inspect --json`` prints."""
    return json.loads(printed(capsys, "data", "inspect", *words, "--json").out)


def error_of(capsys, *words: object, status: int = 2) -> str:
    """Returns the one line that a failing command prints."""
    (line,) = filter(str.strip, printed(capsys, *words, status=status).err.splitlines())
    assert line.startswith("molflt: error: ")
    return line.removeprefix("molflt: error: ")


def table(path: Path, column: str | None = None) -> list[dict[str, str]]:
    """Returns the rows of a CSV file, optionally only rows with a value in a column."""
    with open(path, newline="") as file:
        return [row for row in csv.DictReader(file) if column is None or row[column]]


def logged(run: Path, column: str) -> list[float]:
    return [float(row[column]) for row in table(run / "metrics.csv", column)]


def resume(run: Path, *more: str) -> int:
    words = [f"--resume={run}", *more]
    return train(**build_parser(words).parse_args(words).as_dict())


def weights(run: Path, name: str = "last") -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"{name}.safetensors")


def header(run: Path, name: str) -> dict[str, str]:
    with safe_open(run / "checkpoints" / f"{name}.safetensors", framework="pt") as file:
        return file.metadata()


def last_state(run: Path) -> dict:
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)


def flatten(value, name=""):
    """Yields (name, leaf) of nested dictionaries and lists."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from flatten(part, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for key, part in enumerate(value):
            yield from flatten(part, f"{name}.{key}")
    else:
        yield name, value


def differences(one, other) -> list[str]:
    """Returns the names of leaves that differ in any bit."""
    left, right = dict(flatten(one)), dict(flatten(other))
    names = sorted(set(left) ^ set(right))
    for name in set(left) & set(right):
        a, b = left[name], right[name]
        same = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        if not same:
            names.append(name)
    return names


def assert_same_state(run: Path, reference: Path) -> None:
    one, other = last_state(run), last_state(reference)
    assert one.keys() == other.keys()
    for part in ("state_dict", "current_model_state", "optimizer_states", "lr_schedulers"):
        assert differences(one.get(part), other.get(part)) == [], part


@contextmanager
def at_step(step, act, method="training_step"):
    """Calls `act` once before a step; its result, if any, replaces the batch.

    Step 0 of validation is before training.
    """
    original, done = getattr(_LightningTask, method), []

    def changed(self, batch, *more):
        skipped = step and self.trainer.sanity_checking
        if self.global_step == step and not skipped and not done:
            done.append(step)
            batch = act(batch) or batch
        return original(self, batch, *more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_LightningTask, method, changed)
        yield


def power_cut(_):
    raise RuntimeError("power cut")


def results_of(run: Path, *words: object, out: Path | None = None) -> dict:
    """Runs ``molflt evaluate``, and returns the content of results.json."""
    more = [] if out is None else [f"--out={out}"]
    assert main(["evaluate", str(run), *map(str, words), *more]) == 0
    return json.loads(((out or run) / "results.json").read_text())


def flip(path: Path, place: int = -1) -> None:
    """Changes a bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def alone(run: Path, path: Path, name: str = "best") -> np.ndarray:
    """Predicts the energies of structures one by one, independently of the evaluation."""
    model, _ = load_run(run, name)
    with torch.no_grad():
        batches = (Batch.from_data_list([record]) for record in open_dataset(path))
        return np.array([float(model(batch)["energy"]) for batch in batches])


def page_of(run: Path) -> str:
    """Returns the page that ``molflt report`` writes into a run."""
    assert main(["report", str(run)]) == 0
    return (run / "report.html").read_text(encoding="utf-8")
