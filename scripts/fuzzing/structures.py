"""Formats of structures: OC20's LMDB and its records, the compact store, files of ASE."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from random import Random

from fuzzing import oracles
from fuzzing.cases import Case, Format
from fuzzing.grammar import (
    damage_numbers_in_place,
    damage_pages,
    damage_tensors,
    damage_text,
    damage_tree,
    signed,
)
from fuzzing.mutate import damage
from fuzzing.pickles import damage_pickle
from fuzzing.seeds import ASE_SUFFIXES, write_lmdb

Damage = Callable[[Random, bytes], tuple[bytes, str]]
OUT = "out/store.safetensors"


def reading(draw: Random, file: Path, seeds: Path, what: str, truth: Truth | None) -> Case:
    """A file of structures through inspect, convert or predict; conversions are compared."""
    name, size = file.name, file.stat().st_size
    how = draw.choice(("inspect", "inspect", "convert", "convert", "convert", "predict"))
    skip = ["--skip-bad"] if draw.random() < 0.4 else []
    words = {
        "inspect": ["data", "inspect", name, "--json"],
        "convert": ["data", "convert", name, OUT],
        "predict": ["predict", str(seeds / "run"), name, "--out=out/energies.csv", "--device=cpu"],
    }[how]
    check = None if truth is None else partial(_compare, how, file, truth, bool(skip))
    return Case([*words, *skip], (name,), size, f"{what}; {how}", check)


Truth = Callable[[Path], list[oracles.Structure | None]]


def _compare(how: str, file: Path, truth: Truth, some: bool) -> str | None:
    """Whether a conversion has what the file has, and the other commands as many structures."""
    if how == "convert":
        return oracles.compare(oracles.stored(file.parent / OUT), truth(file), some)
    if how == "inspect":
        summary = json.loads((file.parent / "stdout").read_text())
        found, some = summary["systems"], bool(summary["left_out"])
    else:
        found = len((file.parent / "out/energies.csv").read_text().splitlines()) - 1
    known = len(truth(file))
    return None if found == known or (some and found < known) else f"{found} structures of {known}"


def _pages(draw: Random, folder: Path, seeds: Path) -> Case:
    content, what = damage_pages(draw, (seeds / "seed.lmdb").read_bytes())
    file = folder / "input.lmdb"
    file.write_bytes(content)
    return reading(draw, file, seeds, what, partial(_of_pages, seeds))


def _of_pages(seeds: Path, file: Path) -> list[oracles.Structure | None]:
    """What lmdb finds; and whole records that it cannot reach any more, as they were."""
    return _or_before(sorted((seeds / "records").glob("new-*")), file)


def _or_before(records: Sequence[Path], file: Path) -> list[oracles.Structure | None]:
    """What the references find; what they refuse is as it was, or has to be refused."""
    import lmdb

    before = [oracles.decoded(i, path.read_bytes()) for i, path in enumerate(records)]
    try:
        found = oracles.lmdb_records(file)
    except lmdb.Error:  # the file as a whole
        return before
    return [one or other for one, other in zip_longest(found, before[: len(found)])]


def _record(draw: Random, folder: Path, seeds: Path) -> Case:
    chosen = draw.sample(sorted((seeds / "records").iterdir()), 3)
    contents = [path.read_bytes() for path in chosen]
    at = draw.randrange(3)
    contents[at], what = damage_pickle(draw, contents[at])
    length: bytes | None = b""
    if draw.random() < 0.1:
        length, what = damage_pickle(draw, b"\x80\x04K\x03.")
        length = length or b"\0"
    truth = partial(_or_before, chosen)
    return in_lmdb(draw, folder, seeds, contents, f"record {at}: {what}", length, truth)


def in_lmdb(
    draw: Random,
    folder: Path,
    seeds: Path,
    contents: list[bytes],
    what: str,
    length: bytes | None,
    truth: Truth | None = oracles.lmdb_records,
) -> Case:
    """Records in an LMDB of their own."""
    file = folder / "input.lmdb"
    write_lmdb(file, contents, length)
    return reading(draw, file, seeds, what, truth)


def _store(draw: Random, folder: Path, seeds: Path) -> Case:
    seed = seeds / "data" / "val_id.safetensors"
    content, what = damage_tensors(draw, seed.read_bytes())
    file = folder / "input.safetensors"
    if draw.random() < 0.4:  # by somebody who knows how
        file.write_bytes(signed(content))
        return reading(draw, file, seeds, f"{what}, signed", lambda _: list(oracles.stored(file)))
    file.write_bytes(content)
    case = reading(draw, file, seeds, what, lambda _: list(oracles.stored(seed)))
    if case.words[0] == "predict":
        return Case(case.words, case.names, case.size, case.what, partial(_energies, folder, seeds))
    return case


def _energies(folder: Path, seeds: Path) -> str | None:
    """What is wrong with energies of the undamaged store."""
    found, truth = (folder / "out/energies.csv").read_text(), (seeds / "run.csv").read_text()
    return None if found == truth else "other energies than of the undamaged files"


def _ase(suffix: str, draw: Random, folder: Path, seeds: Path) -> Case:
    content = (seeds / "ase" / f"seed.{suffix}").read_bytes()
    kind = {"xyz": "extxyz", "pdb": "proteindatabank", "poscar": "vasp"}.get(suffix, suffix)
    own: dict[str, Damage] = {"json": _damage_json, "traj": damage_numbers_in_place}
    own["db"] = damage_numbers_in_place
    change = damage if draw.random() < 0.3 else own.get(suffix, damage_text)
    content, what = change(draw, content)
    file = folder / ("POSCAR" if suffix == "poscar" else f"input.{suffix}")
    file.write_bytes(content)
    return reading(draw, file, seeds, what, partial(oracles.ase_frames, kind=kind))


def _damage_json(draw: Random, content: bytes) -> tuple[bytes, str]:
    changed, what = damage_tree(draw, json.loads(content))
    return json.dumps(changed).encode(), what


FORMATS = {
    "lmdb": Format(_pages, 12),
    "record": Format(_record, 16),
    "store": Format(_store, 10),
    **{f"ase-{suffix}": Format(partial(_ase, suffix), 2) for suffix in ASE_SUFFIXES},
}
