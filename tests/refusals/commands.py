from pathlib import Path

import tiny_run
from ase.io import write

from refusals import Refusal, Refused, command, writes


def refused(line: str, option: str, expected: str = "", got: str = "") -> Refusal:
    return Refusal(command(line), option, expected, got, Refused)


def with_config(text: str | bytes, option: str, expected: str = "", got: str = "") -> Refusal:
    """Returns a row for a training run with a configuration."""
    call = command("train --config={folder}/c.yaml --data.root=x", writes("c.yaml", text))
    return Refusal(call, option, expected, got, Refused)


def mixed(folder: Path) -> None:
    untagged = tiny_run.on_slab()
    untagged.set_tags(0)
    write(folder / "x.extxyz", [tiny_run.on_slab(), untagged])
    (folder / "splits").mkdir()
    for split in ("train", "val_id"):
        write(folder / "splits" / f"{split}.extxyz", tiny_run.on_slab())


def unreadable(folder: Path) -> None:
    for name in ("a.xyz", "b.xyz"):
        (folder / name).write_text("bad\n")


BASELINE = "data baseline {folder}/%s {folder}/y.safetensors --calculator=ase.calculators.emt:EMT"
TRAIN = "train --data.root=x"
UNLABELED = "train --data.root={folder}/x.xyz --run={folder}"
ABSENT = "{folder}/absent"
ROWS = [
    # unknown names
    refused("preddict", "preddict", "predict"),
    refused("train --epochs 3", "--epochs", "--trainer.max_epochs"),
    # missing and superfluous words
    refused("predict", "file", "predict --help"),
    refused("train", "data.root", "train --help"),
    refused("train x.xyz", "x.xyz", "--data.root x.xyz"),
    refused("train --data x.xyz", "--data", "--data.root x.xyz"),
    refused("train x.yaml", "x.yaml", "--config x.yaml"),
    # types
    refused("train --model.heads many", "model.heads", "int", "many"),
    # options that are given twice, empty, or without an effect
    refused("evaluate x --checkpoint best --checkpoint=last", "--checkpoint", "once", "=best"),
    refused(f"{TRAIN} --data.root=y", "--data.root", "once", "--data.root=y"),
    refused("evaluate x --skip-bad --no-skip-bad", "--skip_bad", "once", "--skip_bad=false"),
    refused("evaluate x --splits a --splits [b]", "--splits", "once", "[b]"),
    refused("evaluate x --out=", "--out", "a value", "empty"),
    refused("data inspect x --recipe=potential --tags=ase", "potential", "remove", "--tags ase"),
    refused("generate x --temperature=0 --seed=1", "temperature 0", "remove", "--seed 1"),
    refused("generate x --beam=1 --length-penalty=2", "a beam of 1", "", "--length-penalty 2"),
    # ranges, also of other commands
    refused("data inspect x --limit=0", "limit", "[1, ", "0"),
    refused(f"{TRAIN} --model.dim=0", "model.dim", "[1, ", "0"),
    refused(f"{TRAIN} --task.lr=.nan", "task.lr", "float in (0, ", "nan"),
    # configurations
    with_config(b"\xff\xfe\x00", "c.yaml", "YAML"),
    with_config("model: !!python/object/apply:os.system [touch pwned]", "c.yaml", "YAML"),
    with_config("model: {dim: 8}\nmodel: {heads: 2}", "model", "once", "lines 1 and 2"),
    with_config("model: {dim: 8, dim: 16}", "'dim'", "once", "lines 1 and 1"),
    with_config("recipe: is2ree", "recipe", "is2re", "'is2ree'"),
    # files and folders that do not exist
    refused(f"train --data.root={ABSENT} --run={{folder}}/run", "absent", "data set"),
    refused(f"evaluate {ABSENT}", "absent", "run"),
    refused(f"data inspect {ABSENT}", "absent", "OC20 LMDB or file that ASE reads"),
    # the first of several files that cannot be read
    Refusal(command("data inspect {folder}/*.xyz", unreadable), "a.xyz: frame 0", "", "", Refused),
    # energies that are missing or cannot be compared
    Refusal(
        command(UNLABELED, writes("x.xyz", 2 * "1\n\nH 0 0 0\n")),
        *("y_relaxed", "one file", "none", Refused),
    ),
    Refusal(command(BASELINE % "x.extxyz", mixed), "x.extxyz", "tags", "tag 0", Refused),
    Refusal(command(BASELINE % "splits", mixed), "splits", "one split", "folder", Refused),
]
