"""Refusals of training: options, initial weights, resuming, and damaged runs."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import tiny_run
import torch
from torch import nn

from molflt.data.structures.store import write_store
from molflt.tasks.is2re import IS2RETask
from molflt.tasks.masked import MaskedTask
from molflt.tasks.potential import PotentialTask
from molflt.training.checkpoint import read_checkpoint, write_checkpoint
from refusals import Refusal, Refused, command

Prepare = Callable[[Path], object]


def new(words: str, prepare: Prepare | None = None) -> Callable[[Path], None]:
    """A new run on the shared data; {folder} is the empty folder, {run} the shared run."""

    def call(folder: Path) -> None:
        own = words.format(folder=folder, run=tiny_run.shared_run())
        given = tiny_run.arguments(tiny_run.shared_data(), folder / "new", own)
        command(f"train {' '.join(given)}", prepare)(folder)

    return call


def again(change: Prepare, words: str = "") -> Callable[[Path], None]:
    """Resumes a changed copy of the shared run."""
    return command(f"train --resume {{folder}}/run {words}", copy_with(change))


def evaluated(change: Prepare) -> Callable[[Path], None]:
    """Evaluates a changed copy of the shared run."""
    return command("evaluate {folder}/run", copy_with(change))


def copy_with(change: Prepare) -> Prepare:
    return lambda folder: change(shutil.copytree(tiny_run.shared_run(), folder / "run"))


def same(run: Path) -> None:
    pass


def beside(run: Path) -> None:
    (run.parent / "a.yaml").write_text("run: b")


def remove(name: str) -> Prepare:
    return lambda run: (run / "checkpoints" / name).unlink()


def edit(old: str, text: str, name: str = "config.yaml") -> Prepare:
    """Replaces a text in a file of a run."""

    def change(run: Path) -> None:
        before = (run / name).read_text()
        assert old in before
        (run / name).write_text(before.replace(old, text, 1))

    return change


def config(content: bytes) -> Prepare:
    return lambda run: (run / "config.yaml").write_bytes(content)


def state(change: Callable[[dict[str, Any]], object]) -> Prepare:
    """Changes the checkpoint of a run."""

    def apply(run: Path) -> None:
        path = run / "checkpoints" / "last.ckpt"
        checkpoint = read_checkpoint(path)
        change(checkpoint)
        write_checkpoint(path, checkpoint)

    return apply


def reshape(checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"]["model.readout.mlp.0.weight"] = torch.zeros(3)


def spoil(name: str) -> Prepare:
    """Flips a bit of a file in checkpoints/."""

    def change(run: Path) -> None:
        path = run / "checkpoints" / name
        content = bytearray(path.read_bytes())
        content[-5] ^= 16
        path.write_bytes(content)

    return change


def other_data(change: Callable[[list], list]) -> Callable[[Path], None]:
    """Resuming on changed data."""

    def prepare(folder: Path) -> None:
        shutil.copytree(tiny_run.shared_run(), folder / "run")
        shutil.copytree(tiny_run.shared_data(), folder / "data")
        records = change(list(tiny_run.structures(22)))
        write_store(folder / "data" / "train.safetensors", records)

    return command("train --resume {folder}/run --data.root={folder}/data", prepare)


def relabeled(records: list) -> list:
    records[7].y_relaxed += 1e-6
    return records


def foreign(folder: Path) -> None:
    (folder / "new").mkdir()
    (folder / "new" / "config.yaml").write_text("trainer: {max_steps: 4}")


def written(name: str, text: str) -> Prepare:
    return lambda folder: (folder / name).write_text(text)


def saved(**weights: torch.Tensor) -> Prepare:
    return lambda folder: safetensors.torch.save_file(weights, folder / "w.safetensors")


def lacking_checkpoint(folder: Path) -> None:
    run = shutil.copytree(tiny_run.shared_run(), folder / "new")
    (run / "checkpoints" / "last.ckpt").unlink()


LINE = nn.Linear(1, 1)
BOTH = written("a.yaml", "trainer: {max_steps: 7, max_epochs: 1}")
PLAIN = "--model.mixing=softmax --model.position=none --model.position_options=null "
PLAIN += "--model.num_features=null"

# words of a new run, what is prepared in the folder, option, expected, got
NEW: list[tuple[str, Prepare | None, str, str, str]] = [
    ("--trainer.precision=16-mixed", None, "trainer.precision", "GPU", "16"),
    ("--trainer.devices=9999", None, "trainer.devices", "", "9999"),
    ("--config={folder}/a.yaml", BOTH, "trainer.max_epochs=1", "one of", "6 steps"),
    ("--task.interpolate=2", None, "task.interpolate", "[0, 1]", "2"),
    ("--task.noise=0.1", None, "noise", "interpolate", "0.1"),
    (f"--task.redraw_every=2 {PLAIN}", None, "task.redraw_every", "random features", "2"),
    ("--task.freeze embeding.*", None, "task.freeze", "embedding.* (", "embeding.*"),
    ("--task.freeze *", None, "task.freeze", "trainable", ""),
    (
        '--task.freeze embedding.* --task.lr_factors={{"embedding.*":2}}',
        *(None, "task.lr_factors", "trainable", "embedding.*"),
    ),
    ('--task.lr_factors={{"reedout.*":2}}', None, "task.lr_factors", "readout.*", "reedout.*"),
    ('--task.lr_factors={{"readout.*":0}}', None, "task.lr_factors", "(0, ", ""),
    ("--data.train_split=absent", None, "split", "", "'absent'"),
    ("--data.max_atoms=10", None, "max_atoms", "", "10"),
    ("--run={run}", None, "holds checkpoints", "--resume", ""),
    ("", foreign, "new/config.yaml", "empty or new folder", ""),
    ("--config={folder}/new/../new/config.yaml", foreign, "--run", "--config", ""),
    ("", lacking_checkpoint, "safetensors", "empty or new folder", "last.ckpt"),
    ("--init={folder}/none", None, "none", "training run", "no such file"),
    ("--init={run}/metrics.csv", None, "metrics.csv", "training run", "another file"),
    (
        "--init={folder}/w.safetensors",
        saved(other=torch.ones(3)),
        "w.safe",
        "name and shape",
        "other",
    ),
    ("--init={folder}/w.safetensors", saved(a=torch.full((2,), torch.nan)), "'a'", "finite", "NaN"),
]

# words after --resume {folder}/run, change of the run, option, expected, got
AGAIN: list[tuple[str, Prepare, str, str, str]] = [
    ("--init={folder}/run", same, "--init", "--resume", ""),
    ("--run={folder}/a", same, "--run", "own folder", "/a"),
    ("--config={folder}/a.yaml", beside, "--run", "own folder", "/b"),
    ("", remove("last.ckpt"), "last.ckpt", "", "no such checkpoint"),
    ("--model.dim=32", edit("lr: 0.0003", "lr: 0.5"), "model.dim is 16; got 32", "0.0003", "0.5"),
    ("--trainer.max_steps=5", same, "trainer.max_steps", "8", "5"),
    ("", state(lambda x: x.pop("loops")), "last.ckpt", "'loops'", "global_step"),
    ("", state(reshape), "mlp.0.weight", "(16, 16)", "(3,)"),
    (
        "--trainer.max_steps=9",
        edit("lr", "rl", "metrics.csv"),
        "metrics.csv",
        "columns step,lr",
        "",
    ),
]

# change of the run before its evaluation, option, expected, got
READ: list[tuple[Prepare, str, str, str]] = [
    (config(b""), "config.yaml", "key: value", "None"),
    (config(b"!!python/object/apply:os.system [ls]"), "config.yaml", "YAML", ""),
    (edit("dim: 16", "dim: abc"), "config.yaml", "model.dim", "abc"),
    (edit("dim: 16", "dim: null"), "config.yaml", "model.dim", "none"),
    (edit("  dim: 16", "  dmi: 16"), "config.yaml", "model", "dmi"),
    (edit("  dim: 16", "  dim: 24"), "config.yaml", "16", "model.dim is 24"),
    (edit("\nmodel:", "\nmodel: []\nother:"), "config.yaml", "key model", "[]"),
    (edit("recipe: is2re", "recipe: sounds"), "config.yaml", "is2re", "sounds"),
    (spoil("best.safetensors"), "best.safetensors", "sha256", ""),
]

# change of the training data before resuming, option, expected, got
DATA: list[tuple[Callable[[list[Any]], list[Any]], str, str, str]] = [
    (relabeled, "data of this run have changed", "train", "sha256"),
    (lambda records: records[:15], "systems", "22", "15"),
]

TASKS: list[tuple[Callable[[], object], str, str, str]] = [
    (lambda: IS2RETask(LINE, references="fit", energy_mean=-3), "references=fit", "remove", "-3"),
    (lambda: IS2RETask.sums.of(torch.ones(3, 1), torch.ones(3)), "energies", "shape", "(3, 1)"),
    (lambda: PotentialTask(LINE, 0, 0, 0), "stress_weight", "above 0", "0"),
    (lambda: MaskedTask(LINE, mask_share=0.9, random_share=0.2), "mask_share", "at most 1", "0.9"),
]

ROWS = [
    *(Refusal(new(words, prepare), *rest, Refused) for words, prepare, *rest in NEW),
    *(Refusal(again(change, words), *rest, Refused) for words, change, *rest in AGAIN),
    *(Refusal(evaluated(change), *rest, Refused) for change, *rest in READ),
    *(Refusal(other_data(change), *rest, Refused) for change, *rest in DATA),
    *(Refusal(lambda _, make=make: make(), *rest) for make, *rest in TASKS),
]
