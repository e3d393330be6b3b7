"""Refused commands."""

from collections.abc import Callable
from pathlib import Path

from refusals import Refusal, Refused, command


def refused(line: str, option: str, expected: str = "", got: str = "") -> Refusal:
    return Refusal(command(line), option, expected, got, Refused)


def with_config(
    text: str | bytes, option: str, expected: str = "", got: str = "", more: str = ""
) -> Refusal:
    """Returns a row for a training with a configuration."""
    line = f"train --config={{folder}}/c.yaml --data.root=x {more}"
    return Refusal(command(line, writes("c.yaml", text)), option, expected, got, Refused)


def writes(name: str, text: str | bytes) -> Callable[[Path], object]:
    content = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / name).write_bytes(content)


TRAIN = "train --data.root=x"
ABSENT = "{folder}/absent"
ROWS = [
    # unknown names
    refused("preddict", "preddict", "predict"),
    refused("train --model.dmi 3", "--model.dmi", "--model.dim"),
    refused("train --epochs 3", "--epochs", "--trainer.max_epochs"),
    refused("train --model.positions.num_nodes=4", "--model.positions.num_nodes"),
    refused("evaluate run --split a", "--split", "--splits"),
    # missing and superfluous words
    refused("predict", "file", "predict --help"),
    refused("train", "data.root", "train --help"),
    refused("train --data.root x y", "unrecognized arguments: y"),
    refused("train --seed", "--seed", "one value", "none"),
    refused("train --model=a", "model", "", "'a'"),
    # types
    refused("train --model.heads many", "model.heads", "int", "many"),
    refused("train --model.normalize-qk=perhaps", "model.normalize_qk", "bool", "perhaps"),
    refused("train --model.mixing lineer", "model.mixing", "'linear'", "lineer"),
    refused("evaluate run --pictures=jpg", "pictures", "Literal['svg', 'pdf']", "jpg"),
    refused(f"{TRAIN} --seed=null", "seed", "int", "None"),
    # ranges, also of other commands
    refused(f"{TRAIN} --model.dim=0", "model.dim", "[1, ", "0"),
    refused(f"{TRAIN} --task.lr=.nan", "--task.lr", "float in (0, ", "nan"),
    refused(f"{TRAIN} --task.betas 0.9 1.0", "--task.betas", "numbers in [0, 1)", "1.0"),
    # options of a position
    refused(f"{TRAIN} --model.position_options.num_nodes=many", "num_nodes", "int", "many"),
    refused(f"{TRAIN} --model.position_options.width_range=3", "width_range", "tuple", "3"),
    with_config("model: {position_options: {1: 2}}", "position_options", "string", "1"),
    # configurations
    refused("train --config=absent.yaml", "absent.yaml", "YAML"),
    with_config(b"\xff\xfe\x00", "c.yaml", "YAML"),
    with_config("model:\n  heads: [", "c.yaml", "YAML"),
    with_config(2000 * "[", "c.yaml", "YAML"),
    with_config("model: !!python/object/apply:os.system [touch pwned]", "c.yaml", "YAML"),
    with_config("model: {head: 3}", "c.yaml", "unknown key", "'model.head'"),
    with_config("sead: 1", "c.yaml", "unknown key", "'sead'"),
    with_config("resume: x", "c.yaml", "unknown key", "'resume'"),
    with_config("model: {heads: many}", "model.heads", "int", "many"),
    with_config("model: 3", "key model", "keys and values", "3"),
    with_config("model: {dim: 8}\nmodel: {heads: 2}", "model", "once", "lines 1 and 2"),
    with_config("recipe: is2ree", "recipe", "is2re", "'is2ree'"),
    with_config("recipe: potential\nmodel: {dmi: 3}", "model.dmi", "--recipe potential --help"),
    # files and folders that do not exist
    refused(f"train --data.root={ABSENT} --run={{folder}}/run", "absent", "data set"),
    refused(f"evaluate {ABSENT}", "absent", "run"),
    refused(f"report {ABSENT}", "absent", "run"),
    refused(f"report {ABSENT} --out=page.pdf", "page.pdf", ".html", ".pdf"),
    refused(f"data inspect {ABSENT}.lmdb", "absent.lmdb"),
    refused(f"export {ABSENT} {{folder}}/out", "absent"),
    refused(f"merge {ABSENT}.csv", "absent"),
]
