"""Domains of runs with initial weights: structures that only the initial weights have seen."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file
from test_init import CARD, STEPS, STILL, begin
from tiny_run import error_of, structures, table, weights

import molflt
from molflt.commands.cli import main
from molflt.data.structures.datamodule import IS2REData
from molflt.data.structures.domain import Domain
from molflt.data.structures.store import write_store

SEEN = " (seen only by the initial weights)"


def of_elements(mapping: dict[int, int], count: int, seed: int):
    """Yields structures with exchanged elements."""
    for one in structures(count, seed=seed, first_sid=1000 * seed):
        for old, new in mapping.items():
            one.atomic_numbers[one.atomic_numbers == old] = new
        yield one


@pytest.fixture(scope="module")
def gold(tmp_path_factory):
    """Slabs of gold and silver, without copper and platinum."""
    root = tmp_path_factory.mktemp("gold")
    swap = {29: 79, 78: 47, 8: 1}
    write_store(root / "train.safetensors", of_elements(swap, 8, 3))
    write_store(root / "val_id.safetensors", of_elements(swap, 4, 4))
    return root


@pytest.fixture(scope="module")
def tuned(shared_run, gold, tmp_path_factory):
    run = tmp_path_factory.mktemp("tuned") / "run"
    assert begin(gold, run, shared_run, *STEPS) == 0
    return run


def held(run) -> Domain:
    return Domain.from_json(json.loads((run / "domain.json").read_text()), "domain.json")


def alone(root) -> Domain:
    """Returns the domain of data without initial weights."""
    return Domain.from_json(json.loads(IS2REData(root).files()["domain.json"]), "domain.json")


def test_elements_of_the_initial_weights_are_reported(tuned, shared_run, gold, tmp_path, capsys):
    own = held(tuned)
    assert own == alone(gold).after(held(shared_run)) and own.initial == (held(shared_run),)
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


def test_chains_and_exports_keep_all_domains(tuned, shared_run, gold, tmp_path):
    assert main(["export", str(tuned), str(tmp_path / "export"), *CARD]) == 0
    begin(gold, tmp_path / "run", tmp_path / "export", *STILL)
    assert held(tmp_path / "run").initial == (alone(gold), held(shared_run))
    assert molflt.load(tmp_path / "run").domain == held(tmp_path / "run")


@pytest.mark.parametrize("recorded", [True, False])
def test_a_damaged_domain_of_the_source_is_refused(copied_run, gold, tmp_path, capsys, recorded):
    path, file = (copied_run / name for name in ("domain.json", "checkpoints/best.safetensors"))
    if not recorded:  # weights of earlier versions do not contain the digest
        save_file(load_file(file), file)
    path.write_text(path.read_text().replace('"Cu"', '"Xx"'))
    words = [f"--data.root={gold}", f"--run={tmp_path / 'run'}", f"--init={copied_run}", *STILL]
    line = error_of(capsys, "train", *words, "--task.warmup_steps=2", "--trainer.accelerator=cpu")
    assert str(copied_run) in line and "domain.json" in line
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_missing_domain_of_the_source_gives_a_warning(copied_run, gold, tmp_path, capsys):
    """For a run, and for a file of weights."""
    (copied_run / "domain.json").unlink()
    weights_file = copied_run / "checkpoints" / "best.safetensors"
    file = shutil.copy(weights_file, tmp_path / "w.safetensors")
    for name, init, more in (("a", copied_run, []), ("b", file, ["--model.dim=24"])):
        begin(gold, tmp_path / name, init, *STILL, *more)
        assert f"--init {init}: no domain.json" in capsys.readouterr().err
        assert held(tmp_path / name) == alone(gold)
    # elements of the source count only with its embedding, which has another width in b
    seen = [weights(tmp_path / name)["trained_elements"].nonzero().flatten() for name in "ab"]
    assert [one.tolist() for one in seen] == [[1, 8, 29, 47, 78, 79], [1, 47, 79]]
