import json
import shutil
from pathlib import Path
from typing import get_overloads

import numpy as np
import pytest
import torch
import yaml
from ase import Atoms
from ase.build import add_adsorbate, fcc111, molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixBondLengths, FixCartesian, FixedPlane
from ase.io import write
from shared_files import shared
from tiny_run import alone, error_of, printed, table
from torch_geometric.data import Batch

import molflt
from molflt.commands.cli import main
from molflt.commands.evaluate import evaluate
from molflt.data.structures import open_dataset
from molflt.data.structures.augment import repeat
from molflt.graph import EnergyRegressor
from molflt.pretrained import EnergyPredictor
from molflt.pretrained.base import Trained
from molflt.training import checkpoint

ABOUT = "energies of random slabs against nothing, by a formula"


@pytest.fixture(scope="module")
def run(energy_runs, tmp_path_factory) -> Path:
    copy = shutil.copytree(energy_runs[0], tmp_path_factory.mktemp("runs") / "run")
    evaluate(copy, splits=["val_id"], device="cpu")
    return copy


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "small"
    assert main(["export", str(run), str(out), "--about", ABOUT, "--license", "mit"]) == 0
    return out


@pytest.fixture(scope="module")
def val(energy_data) -> list:
    return list(open_dataset(energy_data / "val_id.safetensors"))[:5]


def atoms(symbols: str = "Cu3PtO2H") -> Atoms:
    found = Atoms(symbols, positions=np.eye(7, 3) * 2.5 + np.arange(7)[:, None] * 0.4)
    found.set_cell([8, 8, 20])
    found.set_pbc(True)
    found.set_tags([0, 0, 1, 1, 2, 2, 2])
    return found


def test_python_and_the_command_give_the_same_numbers(run, exported, energy_data, tmp_path) -> None:
    source = energy_data / "val_ood_both.safetensors"
    expected = alone(run, source)
    weights = run / "checkpoints" / "best.safetensors"
    for name in (run, exported / "model.safetensors", weights):
        out = tmp_path / "out.csv"
        assert main(["predict", str(name), str(source), "--out", str(out), "--device", "cpu"]) == 0
        command = [float(row["energy_eV"]) for row in table(out)]
        python = [one.energy for one in molflt.load(name).predict(source)]
        assert command == python
        np.testing.assert_allclose(python, expected, atol=1e-5)


def test_structures_in_any_form(run, val) -> None:
    model = molflt.load(run)
    energies = [one.energy for one in model.predict(val)]
    assert [one.energy for one in model.predict(Batch.from_data_list(val), 2)] == pytest.approx(
        energies, abs=1e-5
    )
    single = model.predict(val[2])
    assert single.energy == pytest.approx(energies[2], abs=1e-5)
    assert single.uncertainty is single.spread is single.embedding is None
    assert model.predict(atoms()).energy == model.predict([atoms()])[0].energy
    with pytest.raises(TypeError, match=r"ase.Atoms.*dict"):
        model.predict({})
    batch = Batch.from_data_list(val)
    for changed in (batch.subgraph(batch.tags > 0), repeat(batch, 1.0)):
        with pytest.raises(ValueError, match=r"added, removed or reordered"):
            model.predict(changed)


def test_static_types_of_files_are_lists() -> None:
    # PyG has no types, so the overload with `Data` accepts everything; the first match counts
    first = get_overloads(EnergyPredictor.predict)[0]
    assert first.__annotations__["return"] == "list[Prediction]"


def test_labels_that_are_not_finite_do_not_change_a_prediction(run, tmp_path) -> None:
    model, file = molflt.load(run), str(tmp_path / "a.traj")
    given, energy = atoms(), model.predict(atoms()).energy
    given.info["y_init"] = np.float64(np.inf)
    forces = np.full((7, 3), [0, np.nan, 0])
    given.calc = SinglePointCalculator(given, energy=float("nan"), forces=forces)
    assert model.predict(given).energy == energy
    write(file, given)
    assert [one.energy for one in model.predict(file)] == [energy]


def test_relaxed_positions_move_free_atoms(run, val, capsys) -> None:
    model, own = molflt.load(run), atoms()
    own.info["mine"], own.constraints = "kept", []
    found = model.predict(val)
    for record, one in zip(val, found, strict=True):
        with torch.no_grad():
            out = model.model(Batch.from_data_list([record]))
        moved = one.relaxed.positions - record.pos.numpy()
        fixed = record.fixed.numpy()
        assert np.abs(moved[fixed]).max() < 1e-6 < np.abs(moved[~fixed]).max()
        np.testing.assert_allclose(moved[~fixed], out["displacement"][~fixed], atol=1e-5)
    relaxed = model.predict(own).relaxed
    assert relaxed.info == own.info and relaxed.calc is None
    assert (relaxed.numbers == own.numbers).all() and (own.positions == atoms().positions).all()
    model, free = molflt.load(run), atoms()
    moved = model.predict(free).relaxed.positions - free.positions
    held = free.copy()
    held.set_constraint([FixCartesian([6], (False, False, True)), FixedPlane([5], (0, 0, 1))])
    found = model.predict(held).relaxed
    expected = moved.copy()
    expected[5:, 2] = 0
    np.testing.assert_allclose(found.positions - free.positions, expected, atol=1e-12)
    assert np.abs(moved[5:, 2]).min() > 1e-6 and len(found.constraints) == 2
    held.set_constraint(FixBondLengths([(5, 6), (4, 5), (4, 6)], tolerance=0))
    found = model.predict([free, held])
    assert found[0].relaxed is not None and found[1].relaxed is None
    err = capsys.readouterr().err
    assert "structure 1" in err and "FixBondLengths" in err


@pytest.mark.parametrize("subsurface", [True, False, "near"])
def test_energies_are_read_from_embeddings(subsurface, val) -> None:
    options = {"dim": 16, "heads": 2, "layers": 1, "ffn_dim": 16, "subsurface": subsurface}
    net = EnergyRegressor(**options, readout="all").eval()
    model = EnergyPredictor(Trained(Path("x"), "is2re", net, [options], {}, {}, {}))
    by_atom, pooled = (model.predict(val, embedding=kind) for kind in ("atoms", "pooled"))
    for record, one, mean in zip(val, by_atom, pooled, strict=True):
        assert one.relaxed is None  # no relaxed positions in training
        assert one.embedding.shape == (record.natoms, 16)
        tags = record.tags.clamp(min=1) if subsurface == "near" else record.tags  # all are near
        counted = (tags > 0).numpy()
        np.testing.assert_allclose(mean.embedding, one.embedding[counted].mean(0), atol=1e-6)
        assert np.any(one.embedding[~counted]) == (subsurface is True)
        with torch.no_grad():
            h = torch.from_numpy(one.embedding[counted])
            atomic = net.readout.mlp(h) * net.readout.factor(tags[tags > 0])
            energy = atomic.sum().double() * net.energy_std + net.energy_mean
        assert float(energy) == pytest.approx(one.energy, abs=1e-5)


def test_an_exported_ensemble_contains_its_calibration(energy_runs, run, tmp_path, val, capsys):
    also = energy_runs[1:]
    evaluate(run, also=also, splits=["val_id"], device="cpu")
    whole = molflt.load(run, also=also)
    found = whole.predict(val)
    assert all(one.uncertainty > 0 and one.spread > 0 and one.relaxed for one in found)
    whole.save_pretrained(tmp_path / "both")
    capsys.readouterr()
    again = molflt.load(tmp_path / "both").predict(val)
    for one, other in zip(found, again, strict=True):
        assert one[:3] == other[:3]
    warnings = capsys.readouterr().err.splitlines()
    assert all("outside the training data" in line for line in warnings)  # and of nothing else
    out = tmp_path / "o.csv"
    write(tmp_path / "in.traj", atoms())
    assert main(["predict", str(tmp_path / "both"), str(tmp_path / "in.traj"), f"--out={out}"]) == 0
    assert {"spread_eV", "uncertainty_eV"} <= table(out)[0].keys()
    whole.save_pretrained(tmp_path / "half", half=True)
    halved = molflt.load(tmp_path / "half").predict(val)
    change = [abs(one.energy - other.energy) for one, other in zip(found, halved, strict=True)]
    assert 0 < max(change) < 0.01
    assert [one.uncertainty for one in halved] == pytest.approx([o.uncertainty for o in found], 0.1)
    sizes = [(tmp_path / n / "model.safetensors").stat().st_size for n in ("both", "half")]
    assert 0.5 < sizes[1] / sizes[0] < 0.7
    assert {w.dtype for w in molflt.load(tmp_path / "half").model.parameters()} == {torch.float32}
    large = next(whole.model.parameters()).data.fill_(1e5)  # float16 would be infinite
    whole.save_pretrained(tmp_path / "half", half=True)
    assert torch.equal(next(molflt.load(tmp_path / "half").model.parameters()), large)


def test_the_model_card_contains_results_and_training_data(exported, run) -> None:
    card = (exported / "README.md").read_text()
    header = yaml.safe_load(card.split("---")[1])
    assert header["license"] == "mit" and header["library_name"] == "molflt"
    assert header["metrics"] == ["mae"] and {"molflt", "is2re"} <= set(header["tags"])
    row = json.loads((run / "results.json").read_text())["val_id"]
    assert f"| val_id | {row['mae_eV']:.4g} | {row['ewt_percent']:.4g} |" in card
    assert ABOUT in card and "trained on 40 systems of H, O, Cu, Pt" in card
    assert "molflt predict small structures.extxyz" in card


def test_the_model_card_contains_all_digits_of_counts(exported, tmp_path, monkeypatch) -> None:
    model = molflt.load(exported)
    rows = {"val_id": {"mae_eV": 0.61234, "n": 24_943}, "other": {"mae_eV": None, "n": 7}}
    (tmp_path / "card").mkdir()
    monkeypatch.chdir(tmp_path / "card")
    EnergyPredictor(model.trained._replace(results=rows)).save_pretrained(".")
    card = Path("README.md").read_text()
    assert 'molflt.load("card")' in card
    assert "| val_id | 0.6123 | 24,943 |\n| other | - | 7 |\n" in card


def test_predictions_with_the_shipped_model(exported, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint, "_WEIGHTS", tmp_path / "weights")
    write("in.extxyz", [atoms(), atoms("Au3PtO2H")])
    assert "include weights" in error_of(capsys, "predict", "in.extxyz")
    shutil.copytree(exported, tmp_path / "weights" / "game-net")
    told = printed(capsys, "predict", "in.extxyz", "--device", "cpu")
    rows = told.out.splitlines()
    assert rows[0] == "index,sid,formula,natoms,outside,energy_eV" and len(rows) == 3
    assert rows[1].startswith("0,0,HCu3O2Pt,7,,") and ",Au not in training," in rows[2]
    assert f"molflt: game-net: {ABOUT}; trained on 40 systems of H, O, Cu, Pt" in told.err
    energies = [one.energy for one in molflt.load("game-net").predict("in.extxyz")]
    assert energies == [float(row.split(",")[-1]) for row in rows[1:]]


def test_the_hub_and_back(exported, tmp_path, monkeypatch, val) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    cache, revision = tmp_path / "cache", "a" * 40
    place = cache / "models--me--small"

    class Created:
        repo_id = "me/small"

    def upload(self, folder_path, **options) -> str:
        assert options["repo_id"] == "me/small"
        card = Path(folder_path, "README.md").read_text()
        assert "\n# small\n" in card and 'molflt.load("hf:me/small")' in card
        blobs = shutil.copytree(folder_path, place / "blobs")
        (place / "snapshots" / revision).mkdir(parents=True)
        for kept in Path(blobs).iterdir():  # the cache contains links
            (place / "snapshots" / revision / kept.name).symlink_to(kept)
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text(revision)
        return "https://the/commit"

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda *_, **__: Created)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    model = molflt.load(exported)
    assert model.push_to_hub("me/small", half=True) == "https://the/commit"
    away = {"cache_dir": cache, "local_files_only": True}
    again = EnergyPredictor.from_pretrained("hf:me/small", **away)
    assert again.name == "small"
    model.save_pretrained(tmp_path / "half", half=True)
    model = molflt.load(tmp_path / "half")
    assert [one.energy for one in again.predict(val)] == [one.energy for one in model.predict(val)]
    with pytest.raises(ValueError, match=r"^hf:me/other: .*Hugging Face Hub"):
        EnergyPredictor.from_pretrained("me/other", **away)
    packaged = EnergyPredictor.from_pretrained("game-net")
    assert packaged.trained.model.weights == molflt.load("game-net").trained.model.weights


# --- the packaged weights against DFT energies, and tags ------------------------------------------


WEIGHTS = Path(__file__).resolve().parents[1] / "molflt" / "weights" / "game-net"


def test_the_errors_on_the_card_are_those_on_dft() -> None:
    systems = np.load(shared("gamenet_fg", "gamenet_fg.npz"))
    splits = json.loads(shared("gamenet_fg", "splits.json").read_text())
    first = np.concatenate([[0], systems["natoms"].cumsum()])
    place = {name: i for i, name in enumerate(systems["name"])}

    def structure(i: int) -> Atoms:
        own = slice(first[i], first[i + 1])
        numbers, pos, tags = (systems[key][own] for key in ("atomic_numbers", "pos", "tags"))
        return Atoms(numbers, pos, cell=systems["cell"][i], pbc=True, tags=tags)

    model = molflt.load()
    results = json.loads((WEIGHTS / "config.json").read_text())["results"]
    assert results
    for split, result in results.items():
        rows = [place[name] for name in splits[split]]
        found = model.predict([structure(i) for i in rows])
        errors = np.abs([one.energy for one in found] - systems["y_relaxed"][rows])
        assert len(rows) == result["n"]
        assert errors.mean() == pytest.approx(result["mae_eV"], abs=1e-4)


def methanol(tags: bool) -> Atoms:
    slab = fcc111("Cu", (3, 4, 4), vacuum=8.0, periodic=True)
    add_adsorbate(slab, molecule("CH3OH"), 2.0, "ontop")
    if not tags:
        slab.set_tags(0)
    return slab


def test_guesses_of_training_replace_tags_of_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).resolve().parents[1]
    model, store = molflt.load(), root / "datasets" / "chgnet-sample" / "val_id.safetensors"
    assert model.reading_of([store]).tags == "oc20"
    monkeypatch.setitem(model.trained.task, "tags", "guess")
    assert model.reading_of([store]).tags == "guess"
    assert model.reading_of([store], "oc20").tags == "oc20"


def test_tags_are_required_and_can_be_guessed() -> None:
    model, plain = molflt.load(), methanol(tags=False)
    with pytest.raises(ValueError, match="tags"):
        model.predict(plain)
    known = model.predict(methanol(tags=True), tags="ase")
    guessed = model.predict(plain, tags="guess")
    assert abs(known.energy - guessed.energy) < 0.5
    # two of four layers are surface, as in the training data
    assert guessed.outside == () and "0.25" in known.outside[0]
    with pytest.raises(ValueError, match="tag"):
        model.predict(plain, force=True)


def test_adsorbates_out_of_reach_of_the_slab_are_reported() -> None:
    near, far = methanol(tags=True), methanol(tags=True)
    far.positions[far.get_tags() == 0, 2] += 4.5
    found = molflt.load().predict([near, far], tags="ase")
    assert ["out of reach" in str(one.outside) for one in found] == [False, True]
    assert found[1].energy == 0


def test_layers_that_look_like_tags_are_refused() -> None:
    thin = fcc111("Cu", (3, 4, 2), vacuum=8.0, periodic=True)
    add_adsorbate(thin, molecule("CH3OH"), 2.0, "ontop")  # the layers look like OC20's tags
    with pytest.raises(ValueError, match="geometry.*CH4O"):
        molflt.load().predict(thin)
