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

from fuzzing.cases import Case, Format
from fuzzing.grammar import (
    WORDS,
    damage_text,
    damage_tree,
)
from fuzzing.mutate import FLOATS, INTEGERS, damage
from fuzzing.seeds import SHARDS

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
    """An order for a shard of predictions."""
    value = draw.choice(_SHARES)
    (folder / "out").mkdir()
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


FORMATS = {
    "shards": Format(_merged, 3),
    "shard": Format(_shard, 1),
    "split": Format(_split, 2),
}
