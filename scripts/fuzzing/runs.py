"""Formats of runs: weights, checkpoints, the other files of a folder, configurations, options."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import zipfile
from functools import partial
from pathlib import Path
from random import Random

import yaml

from fuzzing.cases import Case, Format
from fuzzing.grammar import (
    WORDS,
    damage_tensors,
    damage_text,
    damage_tree,
    join_tensors,
    signed,
    split_tensors,
)
from fuzzing.mutate import FLOATS, INTEGERS, damage
from fuzzing.pickles import damage_pickle
from fuzzing.seeds import KINDS, STEPS, tensors, training

# Options whose large values are orders that a computer carries out, and so proves nothing
_ENDLESS = ("max_steps", "workers", "devices", "strategy")
_ENDLESS += ("unroll", "burn_in", "generations", "members", "window", "dimension", "val_problems")
_PREDICT = ["--out=out/energies.csv", "--device=cpu"]


def _weights(draw: Random, folder: Path, seeds: Path) -> Case:
    run = shutil.copytree(seeds / "run", folder / "run")
    file = run / "checkpoints" / "best.safetensors"
    content, what = damage_tensors(draw, file.read_bytes())
    store = seeds / "data" / "val_id.safetensors"
    words = ["predict", "run", str(store), *_PREDICT]
    if draw.random() < 0.4:  # by somebody who knows how
        file.write_bytes(signed(content))
        return Case(words, (file.name, "sid "), len(content), f"{what}, signed")
    file.write_bytes(content)
    return Case(words, (file.name,), len(content), what, partial(_same_energies, folder, seeds))


def _exported(draw: Random, folder: Path, seeds: Path) -> Case:
    """An exported model whose header says something else, or with damaged weights."""
    file = shutil.copytree(seeds / "exported", folder / "model") / "model.safetensors"
    content = file.read_bytes()
    words = ["predict", "model", str(seeds / "data" / "val_id.safetensors"), *_PREDICT]
    if draw.random() < 0.6:  # by somebody who knows how
        (folder / "model" / "config.json").unlink()
        header, data = split_tensors(content)
        tree, what = damage_tree(draw, json.loads(header["__metadata__"]["molflt"]))
        header["__metadata__"]["molflt"] = json.dumps(tree)
        file.write_bytes(signed(join_tensors(header, data)))
        return Case(words, (file.name, "recipe", "sid "), len(content), f"{what}, signed")
    content, what = damage_tensors(draw, content)
    file.write_bytes(content)
    check = partial(_same_energies, folder, seeds)
    return Case(words, (file.name, "config.yaml"), len(content), what, check)


def _same_energies(folder: Path, seeds: Path) -> str | None:
    found, truth = (folder / "out/energies.csv").read_text(), (seeds / "run.csv").read_text()
    return None if found == truth else "other energies than of the undamaged weights"


def _checkpoint(draw: Random, folder: Path, seeds: Path) -> Case:
    run = shutil.copytree(seeds / "run", folder / "run")
    file = run / "checkpoints" / "last.ckpt"
    how = draw.choice((damage, damage_member, damage_member))
    content, what = how(draw, file.read_bytes())
    words = ["train", "--resume", "run", f"--trainer.max_steps={STEPS + 1}"]
    if how is damage_member and draw.random() < 0.6:  # by somebody who knows how
        file.write_bytes(sealed(content))
        return Case(words, (file.name, "loss is"), len(content), f"{what}, sealed")
    file.write_bytes(content)
    check = partial(_same_end, run, seeds / "resumed")
    return Case(words, (file.name,), len(content), what, check)


def damage_member(draw: Random, content: bytes) -> tuple[bytes, str]:
    """A checkpoint with damage inside of one member of its archive, whose sums are then right."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
        comment = archive.comment
    name = draw.choice(sorted(members))
    if draw.random() < 0.4:
        name = next(each for each in members if each.endswith("data.pkl"))
    change = damage_pickle if name.endswith(".pkl") else damage
    members[name], what = change(draw, members[name] or b"\0")
    if draw.random() < 0.05:
        del members[name]
        what = "removed"
    return zipped(members, comment), f"{name}: {what}"


def zipped(members: dict[str, bytes], comment: bytes = b"") -> bytes:
    """An archive as torch writes them."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.comment = comment
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def sealed(content: bytes) -> bytes:
    """An archive whose comment is the sha256 of all before it, as checkpoints have it."""
    seal = b"sha256:"
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        whole = content[: len(content) - len(archive.comment) - 2]
    whole += (len(seal) + 64).to_bytes(2, "little")
    return whole + seal + hashlib.sha256(whole).hexdigest().encode()


def _same_end(run: Path, truth: Path) -> str | None:
    """Whether a resumed run ended with the weights of the undamaged one."""
    name = "checkpoints/last.safetensors"
    same = tensors(run / name) == tensors(truth / name)
    return None if same else "other weights than from the undamaged checkpoint"


_FILES = (
    ("run", "config.yaml"), ("run", "config.yaml"), ("run", "config.yaml"), ("run", "metrics.csv"),
    ("lm", "vocabulary.json"), ("lm", "config.yaml"), ("img", "classes.json"),
    ("img", "config.yaml"), ("run", "versions.json"),
    ("run", "domain.json"), ("run", "domain.json"),
    ("pixels", "config.yaml"), ("pop", "config.yaml"), ("opt", "config.yaml"),
    ("mt", "config.yaml"), ("mt", "tokenizer.json"), ("mt", "versions.json"),
)  # fmt: skip


def _folder(draw: Random, folder: Path, seeds: Path) -> Case:
    """A run with one other file damaged, missing, or of another run."""
    kind, name = draw.choice([one for one in _FILES if one[0] in KINDS])
    run = shutil.copytree(seeds / kind, folder / kind)
    file = run / name
    content, what = _other(draw, file, seeds)
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    store = seeds / "data" / "val_id.safetensors"
    resume = ["train", "--resume", kind, f"--trainer.max_steps={STEPS + 1}"]
    words = _using(kind, draw, store)
    if name in ("metrics.csv", "versions.json") or draw.random() < 0.2:
        words = resume
    keys = tuple(_keys(seeds / kind / "config.yaml"))
    size = None if name == "config.yaml" else len(content or b"")
    return Case(words, (name, *keys), size, f"{kind}/{name}: {what}")


def _using(kind: str, draw: Random, store: Path) -> list[str]:
    """A command that opens a run of a kind."""
    evaluate = ["evaluate", kind, "--out=out", "--device=cpu"]
    return draw.choice({
        "run": [["predict", kind, str(store), *_PREDICT]],
        "lm": [["generate", kind, "--tokens=3", "--device=cpu"]],
        "img": [evaluate],
        "pixels": [evaluate, ["generate", kind, "--images=1", "--out=out/a.png", "--device=cpu"]],
        "pop": [
            [*evaluate, "--runs=1", "--evaluations=8", "--functions=[levy]", "--baselines=[random]"]
        ],
        "opt": [[*evaluate, "--steps=2", "--repeats=1", "--tasks", "rosenbrock", "--rates", "0.1"]],
        "mt": [[*evaluate, "--beam=2"], ["generate", kind, "--prompt=a cat", "--device=cpu"]],
    }[kind])  # fmt: skip


def _recipe_weights(draw: Random, folder: Path, seeds: Path) -> Case:
    """Damaged weights of one of the recipes that have no energies."""
    kind = draw.choice([name for name in KINDS if name != "run"])
    run = shutil.copytree(seeds / kind, folder / kind)
    file = run / "checkpoints" / "best.safetensors"
    content, what = damage_tensors(draw, file.read_bytes())
    if by_hand := draw.random() < 0.6:  # by somebody who knows how
        content = signed(content)
    file.write_bytes(content)
    words = _using(kind, draw, folder)
    names = (file.name, "finite", *_keys(seeds / kind / "config.yaml"))
    return Case(words, names, None, f"{kind}: {what}{', signed' * by_hand}")


def _started(draw: Random, folder: Path, seeds: Path) -> Case:
    """A training that starts from a run whose domain.json says something else."""
    run = shutil.copytree(seeds / "run", folder / "source")
    file = run / "domain.json"
    tree = json.loads(file.read_text())
    if draw.random() < 0.5:
        tree["initial"] = [json.loads(file.read_text()) for _ in range(draw.choice((1, 2)))]
    content, what = json.dumps(tree).encode(), "whole"
    if draw.random() < 0.7:
        tree, what = damage_tree(draw, tree)
        content = json.dumps(tree).encode()
    elif draw.random() < 0.7:
        content, what = draw.choice((damage, damage_text))(draw, content)
    file.write_bytes(content)
    weights = run / "checkpoints" / "best.safetensors"
    if draw.random() < 0.8:  # by somebody who knows how
        header, data = split_tensors(weights.read_bytes())
        header["__metadata__"]["files"] = json.dumps(
            {"domain.json": hashlib.sha256(content).hexdigest()}
        )
        weights.write_bytes(signed(join_tensors(header, data)))
    words = [*training("run", seeds), "--init=source", "--run=out/run"]
    return Case(words, (file.name,), len(content), what, partial(_has_initial, folder, content))


def _has_initial(folder: Path, content: bytes) -> str | None:
    """Whether the new run says what the source had said."""
    found = json.loads((folder / "out/run/domain.json").read_text()).get("initial", [])
    truth = json.loads(content)
    truth = [{**truth, "initial": None}, *truth.get("initial", [])]
    parts = ("slab", "adsorbate", "untagged")
    now, was = (
        [{*one["elements"][part]} for one in each for part in parts] for each in (found, truth)
    )
    return None if now == was else "other elements than the source's"


def _other(draw: Random, file: Path, seeds: Path) -> tuple[bytes | None, str]:
    how = draw.choice(("missing", "swapped", "bytes", "text", "tree", "tree", "tree"))
    content = file.read_bytes()
    if how == "missing":
        return None, how
    if how == "swapped":
        other = draw.choice([*sorted(seeds.glob(f"*/{file.name}")), seeds / "run/metrics.csv"])
        return other.read_bytes(), f"that of {other.parent.name}"
    if how == "tree" and file.suffix in (".yaml", ".json"):
        tree, what = damage_tree(draw, yaml.safe_load(content))
        if draw.random() < 0.05:
            return b"model: " + b"[" * 20000, "20,000 brackets"
        return _bounded(yaml.safe_dump(tree, allow_unicode=draw.random() < 0.5)).encode(), what
    return (damage_text if how == "text" else damage)(draw, content)


def _bounded(text: str) -> str:
    """A configuration whose numbers of steps, processes and devices can be waited for."""
    return re.sub(rf"\b({'|'.join(_ENDLESS)}): \d{{2,}}.*", r"\1: -5", text)


def _keys(file: Path) -> list[str]:
    """Last words of all keys of a configuration."""
    config = yaml.safe_load(file.read_text())
    groups = [group for group in config.values() if isinstance(group, dict)]
    return sorted({key for group in (config, *groups) for key in group})


def _yaml(draw: Random, folder: Path, seeds: Path) -> Case:
    """A configuration for a new training."""
    kind = draw.choice(("run", "run", *KINDS))
    source = seeds / kind / "config.yaml"
    config = yaml.safe_load(source.read_text())
    config["run"] = "out/run"
    file = folder / "train.yaml"
    if draw.random() < 0.25:
        content, what = draw.choice((damage, damage_text))(draw, source.read_bytes())
        content = re.sub(rb"\nrun: .*|^run: .*", b"\nrun: out/run", content)
    else:
        tree, what = damage_tree(draw, config)
        content = yaml.safe_dump(tree).encode()
    file.write_bytes(_bounded_bytes(content))
    steps = f"--trainer.max_steps={STEPS}"  # unless the configuration says otherwise
    words = ["train", steps, "--config", file.name, "--run=out/run"]
    return Case(words, (file.name, *_keys(source), "no such f"), None, f"{kind}: {what}")


def _bounded_bytes(content: bytes) -> bytes:
    pattern = rf"\b({'|'.join(_ENDLESS)}): *[\"']?\+?\d\S*".encode()
    content = re.sub(rb"\bworkers: *(\+?[1-9]|true).*", b"workers: 0", content)
    return re.sub(pattern, rb"\1: 1", content)


def _options(draw: Random, folder: Path, seeds: Path) -> Case:
    """A command line for a new training, with one or two options changed."""
    kind = draw.choice(("run", "run", *KINDS))
    config = yaml.safe_load((seeds / kind / "config.yaml").read_text())
    options = [
        f"{group}.{key}"
        for group in ("model", "data", "task", "trainer")
        for key in config.get(group, {})
        if key not in _ENDLESS
    ]
    words = [*training(kind, seeds), "--run=out/run"]
    changed = []
    for key in draw.sample(options, draw.choice((1, 1, 2))):
        value = draw.choice((*INTEGERS, *FLOATS, *WORDS, "-1", "0", "-2", "[1]", "{}", "x"))
        name = f"--{key}" if draw.random() < 0.9 else f"--{key}{draw.choice('sx-=')}"
        changed.append(f"{name}={value}" if draw.random() < 0.95 else name)
    # A path that is not there is named itself
    keys = (*(key.partition(".")[2] for key in options), "no such f", "no split", "/data/")
    return Case([*words, *changed], keys, None, f"{kind}: {' '.join(changed)[:100]}")


FORMATS = {
    "weights": Format(_weights, 5),
    "exported": Format(_exported, 3),
    "checkpoint": Format(_checkpoint, 4, trains=True),
    "run-folder": Format(_folder, 6, trains=True),
    "weights-of": Format(_recipe_weights, 4),
    "init": Format(_started, 2, trains=True),
    "yaml": Format(_yaml, 5, trains=True),
    "options": Format(_options, 5, trains=True),
}
