"""Formats of what several processes share, and of the commands that make and divide data."""

from __future__ import annotations

import csv
import gzip
import json
import re
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random

from fuzzing import oracles
from fuzzing.cases import Case, Format
from fuzzing.grammar import (
    WORDS,
    damage_tensors,
    damage_text,
    damage_tree,
    signed,
)
from fuzzing.mutate import FLOATS, INTEGERS, damage
from fuzzing.parts import MADE, SHARDS, SPLITS

_ENDINGS = ("csv", "json", "extxyz")


def _merged(draw: Random, folder: Path, seeds: Path) -> Case:
    """Predictions in shards, one of which is damaged, missing, twice there, or of another file."""
    ending = draw.choice(_ENDINGS)
    out = folder / "out"
    out.mkdir()
    for file in (seeds / "shards").glob(f"e.*.{ending}"):
        shutil.copy(file, out)
    file = out / f"e.{draw.randint(1, SHARDS)}-of-{SHARDS}.{ending}"
    how = draw.choice(("bytes", "text", "text", "tree", "missing", "swapped", "more", "whole"))
    what = how
    if how == "missing":
        file.unlink()
    elif how == "swapped":
        others = sorted((seeds / "shards").glob("e*"))
        shutil.copy(draw.choice(others), file)
    elif how == "more":
        name = draw.choice(
            ("e.4-of-3", "e.1-of-4", "e.01-of-3", "e.0-of-3", "e.1-of-0", "e.x-of-3")
        )
        shutil.copy(file, out / f"{name}.{ending}")
    elif how == "tree" and ending == "json":
        tree, what = damage_tree(draw, json.loads(file.read_text()))
        file.write_text(json.dumps(tree))
    elif how != "whole":
        content, what = (damage if how == "bytes" else damage_text)(draw, file.read_bytes())
        file.write_bytes(content)
    names = (f"e.{ending}", file.name)
    check = partial(_same_rows, out, seeds / "shards", file)
    size = sum(path.stat().st_size for path in out.iterdir())
    return Case(["merge", f"out/e.{ending}"], names, size, f"{file.name}: {what}", check)


def _same_rows(out: Path, truth: Path, damaged: Path) -> str | None:
    """Whether whole shards are in the file as they were; a damaged one has as many rows."""
    name = f"e{damaged.suffix}"
    found, whole = (_lines(folder / name) for folder in (out, truth))
    if len(found) != len(whole):
        return f"{len(found)} rows of {len(whole)}"
    of_others = {
        line
        for number in range(1, SHARDS + 1)
        if number != int(damaged.name.split(".")[1].partition("-")[0])
        for line in _lines(truth / f"e.{number}-of-{SHARDS}{damaged.suffix}")
    }
    kept = {_bare(line) for line in of_others} & {_bare(line) for line in whole}
    lost = kept - {_bare(line) for line in found}
    return f"lost: {sorted(lost)[0][:80]}" if lost else None


def _lines(path: Path) -> list[str]:
    """Rows of a table, structures of an extended XYZ."""
    text = path.read_text()
    if path.suffix == ".json":
        return [json.dumps(row) for row in json.loads(text)]
    if path.suffix == ".csv":
        return [json.dumps(row) for row in csv.DictReader(text.splitlines())]
    lines, heads = text.splitlines(), []
    while lines:
        heads.append(lines[1])
        lines = lines[int(lines[0]) + 2 :]
    return heads


def _bare(line: str) -> str:
    """Without what only shards say."""
    if not line.startswith("{"):
        return re.sub(r' index=\d+ shard="[^"]*"', "", line)
    row = json.loads(line)
    return json.dumps({key: value for key, value in row.items() if key not in ("index", "shard")})


_SHARES = (
    *("1/1", "1/3", "3/3", "2/3", "0/3", "4/3", "1/0", "1/4", "5/5", "1/10000", "1/10001", "-1/3"),
    *("1 / 3", "1/3/3", "1.0/3", "/", "1", "١/3", "", "1/3x", "9" * 30 + "/" + "9" * 31, *WORDS),
)


def _shard(draw: Random, folder: Path, seeds: Path) -> Case:
    """An order for a shard, of predictions or of a data set of which all is made."""
    value = draw.choice(_SHARES)
    (folder / "out").mkdir()
    if draw.random() < 0.2:
        shutil.copytree(seeds / "parts", folder / "out" / "made")
        words = ["data", "make", "out/made", *MADE, f"--shard={value}"]
        return Case(words, ("shard", "option"), None, f"made {value!r:.60}")
    ending, batch = draw.choice(_ENDINGS), draw.choice(("1", "2", "64"))
    words = ["predict", str(seeds / "run"), str(seeds / "data/val_id.safetensors")]
    words += [f"--out=out/e.{ending}", f"--shard={value}", f"--batch_size={batch}", "--device=cpu"]
    if draw.random() < 0.1:
        words[3] = draw.choice(("--out=out/e.traj", "--out=out", "--out=out/e", "--skip-bad"))
    check = partial(_some_rows, folder / "out", seeds / "shards") if batch == "2" else None
    if words[3].endswith("traj"):
        check = None
    return Case(words, ("shard", "option", "--out", "out"), None, f"{value!r:.60}", check)


def _some_rows(out: Path, truth: Path) -> str | None:
    (file,) = out.iterdir()
    whole = {_bare(line) for line in _lines(truth / f"e{file.suffix}")}
    found = [_bare(line) for line in _lines(file)]
    more = [line for line in found if line not in whole]
    return f"not of the whole: {more[0][:80]}" if more or not found else None


def _made(draw: Random, folder: Path, seeds: Path) -> Case:
    """A data set of relaxations to join, or to enlarge, with one of its files damaged."""
    kind = draw.choice(("parts", "joined"))
    made = folder / "out" / "made"
    shutil.copytree(seeds / kind, made)
    # a damaged part, or settings without molecules, would be relaxed again, for a minute
    chosen = [file for file in made.glob("**/*") if file.is_file() and ".parts" not in str(file)]
    file = draw.choice([made / "made.json", *sorted(chosen)])
    by_hand = False
    content, what = file.read_bytes(), "missing"
    if file.suffix == ".safetensors":
        content, what = damage_tensors(draw, content)
        if by_hand := draw.random() < 0.4:  # by somebody who knows how
            content = signed(content)
        file.write_bytes(content)
    elif file.name == "made.json" and draw.random() < 0.7:
        tree, what = damage_tree(draw, json.loads(content))
        if not isinstance(tree, dict) or "molecules_eV" not in tree:
            tree, what = [tree], "no settings"
        file.write_text(json.dumps(tree))
    elif draw.random() < 0.15 and file.name != "made.json":
        file.unlink()
    else:
        content, what = draw.choice((damage, damage_text))(draw, content)
        file.write_bytes(content)
    words = ["data", "make", "out/made", *MADE]
    if kind == "joined":
        words[3:5] = ["--train=2", "--val=2"]
    if draw.random() < 0.2:
        words.append("--shard=1/2")
    names = ("made", file.name)
    unlike = by_hand or "--shard" in words[-1]
    check = None if unlike else partial(_joined, made, seeds)
    return Case(words, names, None, f"{kind}/{file.relative_to(made)}: {what}", check)


def _joined(made: Path, seeds: Path) -> str | None:
    """Whether the stores hold what their parts held."""
    for split in SPLITS:
        found = oracles.stored(made / f"{split}.safetensors")
        parts = sorted(seeds.glob(f"*/.parts/{split}/*.safetensors"))
        truth = [one for part in parts[::-1] for one in oracles.stored(part)][: len(found)]
        if complaint := oracles.compare(found, list(truth), False):
            return f"{split}: {complaint}"
    with (made / "systems.csv").open(newline="") as file:
        rows = [row["sid"] for row in csv.DictReader(file)]
    stored = [len(oracles.stored(made / f"{split}.safetensors")) for split in SPLITS]
    return None if len(set(rows)) == sum(stored) else f"{len(rows)} names of {sum(stored)}"


def _split(draw: Random, folder: Path, seeds: Path) -> Case:
    """A FASTA file and perhaps its clusters, one of them damaged."""
    letters = "ACDEFGHIKLMNPQRSTVWY"
    names = [f"{draw.choice(('sp|P', 'x', 'é'))}{i}" for i in range(12)]
    sequences = ["".join(draw.choices(letters, k=draw.choice((1, 30, 61, 200)))) for _ in names]
    sequences[3] = sequences[7]
    fasta = "".join(f">{n} about it\n{s}\n" for n, s in zip(names, sequences, strict=True)).encode()
    clusters = "".join(f"{name}\tc{i % 4}\n" for i, name in enumerate(names)).encode()
    with_clusters = draw.random() < 0.5
    what = "whole"
    ending = draw.choice(("fasta", "fasta", "fa", "gz"))
    if with_clusters and draw.random() < 0.6:
        clusters, what = draw.choice((damage, damage_text))(draw, clusters)
    else:
        fasta, what = draw.choice((damage, damage_text))(draw, fasta)
    packed = gzip.compress(fasta, mtime=0) if ending == "gz" else fasta
    if ending == "gz" and draw.random() < 0.3:
        packed, what = damage(draw, packed)
    file = folder / f"input.{'fasta.gz' if ending == 'gz' else ending}"
    file.write_bytes(packed)
    words = ["data", "split", file.name, "out", "--val_fraction=0.3", "--test_fraction=0.3"]
    if draw.random() < 0.2:
        value = draw.choice((*FLOATS, *INTEGERS, "0", "1", "0.5", "x"))
        words[4] = f"--val_fraction={value}"
        what = words[4][:60]
    if with_clusters:
        (folder / "clusters.tsv").write_bytes(clusters)
        words.append("--clusters=clusters.tsv")
    given = (file.name, "clusters.tsv", "fraction")
    return Case(words, given, len(fasta) + len(clusters), what, partial(_sides, folder, file))


def _sides(folder: Path, file: Path) -> str | None:
    """Whether every record is on one side, and no sequence on two."""
    content = file.read_bytes()
    text = (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode()
    records = [_record(part) for part in re.split(r"^>", text, flags=re.M)[1:]]
    sides = {
        path.stem: [_record(part) for part in path.read_text().split(">")[1:]]
        for path in (folder / "out").iterdir()
    }
    found = Counter(one for side in sides.values() for one in side)
    if sum(found.values()) != len(records):
        return f"{sum(found.values())} records of {len(records)}"
    if lost := Counter(residues for _, residues in records) - Counter(
        residues for _, residues in found.elements()
    ):
        return f"lost: {next(iter(lost))[:40]!r}"
    if not (folder / "clusters.tsv").exists():
        sets = [{residues for _, residues in side} for side in sides.values()]
        if sum(map(len, sets)) != len(set().union(*sets)):
            return "a sequence on two sides"
    return None


def _record(part: str) -> tuple[str, str]:
    head, _, body = part.partition("\n")
    return (head.split() or [""])[0], "".join(body.split()).upper().rstrip("*")


def _listops(draw: Random, folder: Path, seeds: Path) -> Case:
    """Expressions of odd sizes: few of them, as many are an order."""
    values = (*INTEGERS, *FLOATS, *WORDS, "-1", "0", "1", "2", "3", "10", "[1]", "x")
    keys = ("depth", "arguments", "min_length", "max_length", "seed", "train", "val", "test")
    words = ["--train=4", "--val=2", "--test=2", "--depth=3", "--arguments=3", "--min_length=3"]
    words += ["--max_length=40"]
    for key in draw.sample(keys, draw.choice((1, 1, 2))):
        value = draw.choice(values)
        if key in ("train", "val", "test") and re.fullmatch(r"[\d_]{3,}", str(value)):
            value = 7
        words = [word for word in words if not word.startswith(f"--{key}=")] + [f"--{key}={value}"]
    what = " ".join(words[-2:])[:100]
    check = partial(_values, folder / "out")
    return Case(["data", "listops", "out", *words], keys, None, what, check)


def _values(out: Path) -> str | None:
    """Whether each expression is another one, and has the value that Python computes."""
    named = {"[MIN": "min(", "[MAX": "max(", "[MED": "med(", "[SM": "total("}

    def median(*numbers: int) -> int:
        ordered, half = sorted(numbers), len(numbers) // 2
        return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) // 2

    known = {"min": min, "max": max, "med": median, "total": lambda *n: sum(n) % 10}
    seen: set[str] = set()
    for path in out.iterdir():
        for line in path.read_text().splitlines()[1:]:
            text, _, value = line.partition("\t")
            python = "".join(named.get(t, ")," if t == "]" else f"{t},") for t in text.split())
            if eval(python, {"__builtins__": {}}, known) != (int(value),):
                return f"{text[:80]} is not {value}"
            if text in seen:
                return f"twice: {text[:80]}"
            seen.add(text)
    return None


FORMATS = {
    "shards": Format(_merged, 3),
    "shard": Format(_shard, 1),
    "made": Format(_made, 2),
    "split": Format(_split, 2),
    "listops": Format(_listops, 1),
}
