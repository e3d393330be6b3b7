import shutil
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import tiny_run
import torch
from ase import Atoms
from ase.io import write
from torch import nn

from molflt.data.structures.datamodule import IS2REData
from molflt.data.structures.store import write_store
from molflt.tasks.is2re import IS2RETask
from molflt.tasks.masked import MaskedTask
from molflt.tasks.potential import PotentialTask
from molflt.training.checkpoint import read_checkpoint
from molflt.training.trainer import TrainerOptions
from refusals import Refusal, Refused, command, refused, writes

Prepare = Callable[[Path], object]


def far_baseline(folder: Path) -> None:
    info = {"y_relaxed": -1.0, "mlip": -51.0}
    frames = [Atoms("H2", [[0, 0, 0], [0, 0, z]], info=info) for z in (0.7, 0.8, 0.9, 1.0)]
    write(folder / "x.extxyz", frames)
    IS2REData(folder / "x.extxyz", val_fraction=0.5, baseline_key="mlip").refuse_totals()


def untagged(folder: Path) -> None:
    frames = [Atoms("CuO", [[0, 0, 0], [0, 0, z]]) for z in (1.8, 2)]
    for i, frame in enumerate(frames):
        frame.info = {"y_relaxed": -1.0, "sid": f"oxide-{i}"}
    write(folder / "x.extxyz", frames)


def new(words: str, prepare: Prepare | None = None) -> Callable[[Path], None]:
    """Starts a run on the shared data; {folder} is the empty folder, {run} the shared run."""

    def call(folder: Path) -> None:
        own = words.format(folder=folder, run=tiny_run.shared_run())
        given = tiny_run.arguments(tiny_run.shared_data(), folder / "new", own)
        last = {word.partition("=")[0]: word for word in given}
        command(f"train {' '.join(last.values())}", prepare)(folder)

    return call


def evaluated(change: Prepare) -> Callable[[Path], None]:
    return command("evaluate {folder}/run", copy_with(change))


def copy_with(change: Prepare) -> Prepare:
    return lambda folder: change(shutil.copytree(tiny_run.shared_run(), folder / "run"))


def same(run: Path) -> None:
    pass


def remove(name: str) -> Prepare:
    return lambda run: (run / "checkpoints" / name).unlink()


def edit(old: str, text: str) -> Prepare:
    def change(run: Path) -> None:
        before = (run / "config.yaml").read_text()
        assert old in before
        (run / "config.yaml").write_text(before.replace(old, text, 1))

    return change


def config(content: bytes) -> Prepare:
    return lambda run: (run / "config.yaml").write_bytes(content)


def reshaped(run: Path) -> None:
    path = run / "checkpoints" / "last.ckpt"
    checkpoint = read_checkpoint(path)
    checkpoint["state_dict"]["model.readout.mlp.0.weight"] = torch.zeros(3)
    torch.save(checkpoint, path)


def relabeled(folder: Path) -> None:
    shutil.copytree(tiny_run.shared_run(), folder / "run")
    shutil.copytree(tiny_run.shared_data(), folder / "data")
    records = list(tiny_run.structures(22))
    records[7].y_relaxed += 1e-6
    write_store(folder / "data" / "train.safetensors", records)


def foreign(folder: Path) -> None:
    (folder / "new").mkdir()
    (folder / "new" / "config.yaml").write_text("trainer: {max_steps: 4}")


def saved(**weights: torch.Tensor) -> Prepare:
    return lambda folder: safetensors.torch.save_file(weights, folder / "w.safetensors")


LINE = nn.Linear(1, 1)
ON_OTHERS = "train --resume {folder}/run --data.root={folder}/data"
BOTH = writes("a.yaml", "trainer: {max_steps: 7, max_epochs: 1}")
PLAIN = "--model.mixing=softmax --model.position=none --model.position_options=null "
PLAIN += "--model.num_features=null"

# words of a new run, what is prepared in the folder, option, expected, got
NEW: list[tuple[str, Prepare | None, str, str, str]] = [
    ("--config={folder}/a.yaml", BOTH, "trainer.max_epochs=1", "one of", "6 steps"),
    ("--trainer.precision=fp8", None, "trainer.precision", "bf16-mixed", "fp8"),
    (
        "--data.root={folder}/x.extxyz",
        untagged,
        "x.extxyz: 1 of 1 structures have no tags",
        "--data.tags guess",
        "sid oxide-",
    ),
    ("--task.noise=0.1", None, "noise", "interpolate", "0.1"),
    (
        "--model.position_head=false --task.position_weight=2",
        None,
        "position_weight=2",
        "head",
        "2",
    ),
    ("--task.references=adapt", None, "task.references=adapt", "--init", "none"),
    (
        "--model.readout=all --task.repeat=0.5 --task.references=none",
        None,
        "task.repeat=0.5",
        "adsorption energies",
        "task.references=none",
    ),
    (f"--task.redraw_every=2 {PLAIN}", None, "task.redraw_every", "random features", "2"),
    ('--task.freeze=["*"]', None, "task.freeze", "remove a pattern", "['*']"),
    ('--task.lr_factors={{"reedout.*":2}}', None, "task.lr_factors", "readout.*", "reedout.*"),
    ('--task.lr_factors={{"*":2,"readout.*":3}}', None, "task.lr_factors", "earlier", "readout.*"),
    ("--data.max_atoms=9", None, "train.safetensors: sid", "max_atoms=9", "got"),
    ("--data.train_split=absent", None, "split", "", "'absent'"),
    ("--run={run}", None, "contains checkpoints", "--resume", ""),
    ("", foreign, "new/config.yaml", "empty or new folder", ""),
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
    ("--init={folder}/run", same, "init is None", "--resume", "/run"),
    ("--run={folder}/b", same, "--run", "own folder", "/b"),
    ("", remove("last.ckpt"), "last.ckpt", "", "no such checkpoint"),
    ("--model.dim=32", edit("lr: 0.0003", "lr: 0.5"), "model.dim is 16; got 32", "0.0003", "0.5"),
    ("--trainer.max_steps=5", same, "trainer.max_steps", "8", "5"),
    ("", reshaped, "mlp.0.weight", "(16, 16)", "(3,)"),
]

# change of the run before its evaluation, option, expected, got
READ: list[tuple[Prepare, str, str, str]] = [
    (config(b""), "config.yaml", "key: value", "None"),
    (edit("  dim: 16", "  dim: 24"), "config.yaml", "16", "model.dim is 24"),
    (edit("recipe: is2re", "recipe: sounds"), "config.yaml", "is2re", "sounds"),
]

ROWS = [
    refused(lambda: TrainerOptions(val_every=0), "trainer.val_every", "int in [1, 2e9]", "0"),
    Refusal(far_baseline, "y_relaxed minus mlip", "tags and calculator", "25.0 eV per atom"),
    *(Refusal(new(words, prepare), *rest, Refused) for words, prepare, *rest in NEW),
    *(
        Refusal(
            command(f"train --resume {{folder}}/run {words}", copy_with(change)), *rest, Refused
        )
        for words, change, *rest in AGAIN
    ),
    *(Refusal(evaluated(change), *rest, Refused) for change, *rest in READ),
    Refusal(
        command("predict {folder}/run x --compiled", copy_with(same)),
        "compiled",
        "",
        "run",
        Refused,
    ),
    Refusal(command(ON_OTHERS, relabeled), "data of this run have changed", "", "sha256", Refused),
    refused(lambda: IS2RETask.sums.of(torch.ones(3, 1), torch.ones(3)), "energies", "", "(3, 1)"),
    refused(lambda: PotentialTask(LINE, 0, 0, 0), "force_weight", "at least one", "0"),
    refused(lambda: MaskedTask(LINE, mask_share=0.9, random_share=0.2), "mask_share", "", "0.9"),
]
