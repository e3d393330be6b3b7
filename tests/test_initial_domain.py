"""What a run that starts from other weights says of structures that only these had seen."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from test_init import CARD, STEPS, STILL, begin, weights
from tiny_run import error_of, start, structures, table, write_data

import molflt
from molflt.commands.cli import main
from molflt.data.structures.datamodule import IS2REData
from molflt.data.structures.domain import Domain
from molflt.data.structures.in_memory import StructuresInMemory
from molflt.data.structures.store import write_store

SEEN = " (seen by the initial weights alone)"


def of_elements(mapping: dict[int, int], count: int, seed: int):
    """Structures whose H, O, Cu and Pt are others."""
    for one in structures(count, seed=seed, first_sid=1000 * seed):
        for old, new in mapping.items():
            one.atomic_numbers[one.atomic_numbers == old] = new
        yield one


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    root = tmp_path_factory.mktemp("source")
    start(write_data(root / "data"), root / "run", *STEPS)
    return root / "run"


@pytest.fixture(scope="module")
def gold(tmp_path_factory):
    """Slabs of gold and silver, without copper and platinum."""
    root = tmp_path_factory.mktemp("gold")
    swap = {29: 79, 78: 47, 8: 1}
    write_store(root / "train.safetensors", of_elements(swap, 8, 3))
    write_store(root / "val_id.safetensors", of_elements(swap, 4, 4))
    return root


@pytest.fixture(scope="module")
def tuned(source, gold, tmp_path_factory):
    run = tmp_path_factory.mktemp("tuned") / "run"
    assert begin(gold, run, source, *STEPS) == 0
    return run


def held(run) -> Domain:
    return Domain.from_json(json.loads((run / "domain.json").read_text()), "domain.json")


def alone(root) -> Domain:
    """Of the data of a folder, as a run without other weights has it."""
    return Domain.from_json(json.loads(IS2REData(root).files()["domain.json"]), "domain.json")


def test_what_only_the_initial_weights_saw_is_told_apart(tuned, source, gold, tmp_path, capsys):
    own = held(tuned)
    assert own == alone(gold).after(held(source)) and own.initial == (held(source),)
    found = {}
    for symbol, number in {"Au": 79, "Cu": 29, "Ru": 44}.items():
        (one,) = of_elements(dict.fromkeys([1, 8, 29, 78], number), 1, 7)
        found[symbol] = [text for text in own.outside(one) if text.startswith(symbol)]
    assert found["Cu"] == [f"Cu not in training{SEEN}"]
    assert found["Ru"] == ["Ru not in training"]
    assert not any("not in training" in text for text in found["Au"])
    store = tmp_path / "copper.safetensors"
    write_store(store, of_elements({1: 29, 8: 29, 78: 44}, 2, 7))
    capsys.readouterr()
    assert main(["predict", str(tuned), str(store), f"--out={tmp_path / 'out.csv'}"]) == 0
    told = capsys.readouterr().err
    assert f"Cu not in training{SEEN} (2 structures)" in told and "Ru not in training (2" in told
    cells = [row["outside"] for row in table(tmp_path / "out.csv")]
    assert all(cell.startswith(f"Cu not in training{SEEN}; Ru not in training") for cell in cells)


def test_summaries_name_both_and_labels_are_the_new_ones(tuned, source, gold):
    said = molflt.load(tuned).summary
    new, old = alone(gold).describe(), held(source).describe()
    assert f"trained on {new}; from weights trained on {old}" in said
    assert held(tuned).energy == alone(gold).energy != held(source).energy


def test_a_chain_of_starts_keeps_them_all_also_by_an_export(tuned, source, gold, tmp_path):
    assert main(["export", str(tuned), str(tmp_path / "export"), *CARD]) == 0
    begin(gold, tmp_path / "run", tmp_path / "export", *STILL)
    assert held(tmp_path / "run").initial == (alone(gold), held(source))
    assert molflt.load(tmp_path / "run").domain == held(tmp_path / "run")


def test_a_run_that_goes_on_needs_neither_source_nor_file(source, gold, tmp_path):
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    begin(gold, tmp_path / "run", copy, *STEPS)
    shutil.rmtree(copy)
    kept = tmp_path / "run" / "domain.json"
    before = kept.read_bytes()
    kept.unlink()
    assert main(["train", f"--resume={tmp_path / 'run'}", "--trainer.max_steps=8"]) == 0
    assert kept.read_bytes() == before and b'"initial"' in before
    assert molflt.load(tmp_path / "run").domain == held(tmp_path / "run")


def damaged(run):
    path = run / "domain.json"
    path.write_text(path.read_text().replace('"Cu"', '"Xx"'))


def unsealed(run):
    """As of a version whose weights do not hold the digest."""
    file = run / "checkpoints" / "best.safetensors"
    save_file(load_file(file), file)
    damaged(run)


def no_json(run):
    unsealed(run)
    (run / "domain.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (damaged, "domain.json: changed since best.safetensors was trained with it"),
        (unsealed, "domain.json: key elements: expected lists of symbols"),
        (no_json, "domain.json: expected JSON; "),
    ],
)
def test_a_damaged_domain_of_the_source_is_refused(source, gold, tmp_path, capsys, damage, said):
    run = Path(shutil.copytree(source, tmp_path / "source"))
    damage(run)
    words = [f"--data.root={gold}", f"--run={tmp_path / 'run'}", f"--init={run}", *STILL]
    line = error_of(capsys, "train", *words, "--task.warmup_steps=2", "--trainer.accelerator=cpu")
    assert str(run) in line and said in line
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_missing_domain_of_the_source_is_said(source, gold, tmp_path, capsys):
    """Of a run, and of a file of weights alone."""
    run = Path(shutil.copytree(source, tmp_path / "source"))
    (run / "domain.json").unlink()
    file = shutil.copy(source / "checkpoints" / "best.safetensors", tmp_path / "w.safetensors")
    for name, init, more in (("a", run, []), ("b", file, ["--model.dim=24"])):
        begin(gold, tmp_path / name, init, *STILL, *more)
        err = capsys.readouterr().err
        assert f"--init {init}: no domain.json belongs to it" in err
        assert held(tmp_path / name) == alone(gold)
    # elements of the source count only with its embedding, which has another width
    seen = [weights(tmp_path / name)["trained_elements"].nonzero().flatten() for name in "ab"]
    assert [one.tolist() for one in seen] == [[1, 8, 29, 47, 78, 79], [1, 47, 79]]


def test_each_aspect_is_told_apart() -> None:
    """Sizes, parts, tags and boundaries too; what the first data cannot tell is not claimed."""

    def record(**changes):
        one = next(iter(structures(1)))
        one.atomic_numbers[:] = 29
        for name, value in changes.items():
            one[name] = value
        return one

    def domain(*records):
        return Domain.of(StructuresInMemory(list(records)))

    base = record()
    tags = base.tags
    new = domain(base)
    molecule = record(tags=tags * 0, pbc=base.pbc & False)
    bare = record(tags=tags.clamp(max=1))
    for first, other, expected in (
        (molecule, molecule, ["no tags, which training had", "not periodic, trained on"]),
        (bare, bare, ["no adsorbate (tag 2)"]),
    ):
        found = new.after(domain(first)).outside(other)
        assert [text.endswith(SEEN) for text in found] == [True] * len(expected), found
        assert all(text.startswith(want) for text, want in zip(found, expected, strict=True))
        assert not any(text.endswith(SEEN) for text in new.outside(other))
    # no part of a structure without tags is known
    assert new.after(domain(molecule)).outside(bare) == ["no adsorbate (tag 2)"]
    assert new.after(domain(base)).outside(base) == []
