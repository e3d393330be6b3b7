import hashlib
import json
import shutil
from pathlib import Path

import pytest
import recipe_runs
import torch
from ase.io import write
from safetensors.torch import save_file
from tiny_run import (
    SMALL,
    differences,
    last_state,
    logged,
    on_slab,
    printed,
    resume,
    start,
    structures,
    table,
    weights,
    write_splits,
)

import molflt
from molflt.commands.cli import main
from molflt.data.structures.datamodule import IS2REData
from molflt.data.structures.domain import Domain
from molflt.data.structures.store import StructureStore, write_store
from molflt.evaluation.ensemble import load_ensemble
from molflt.evaluation.evaluated import EvaluationData
from molflt.training.checkpoint import load_run, packaged, read_saved
from molflt.training.config import read_config
from molflt.training.start import _transfer, build_parser

STEPS = ["--trainer.max_steps=2", "--trainer.val_every=2", "--trainer.num_sanity=0"]
# the steps are too small to change a weight, so the last weights are the initial weights
STILL = [*STEPS, "--task.lr=1e-30"]
CARD = ["--license=mit", "--about=energies in eV"]


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    splits = {"train": structures(9, 5, 5000), "val_id": structures(5, 6, 6000)}
    return write_splits(tmp_path_factory.mktemp("others"), **splits)


@pytest.fixture(scope="module")
def source(shared_data, tmp_path_factory):
    run = tmp_path_factory.mktemp("source") / "run"
    start(shared_data, run, *STEPS, "--task.lr=1e-2", "--model.layers=2", "--model.readout=all")
    return run


def begin(data, run, init, *more):
    """Starts a run that takes the options of the model from the source."""
    words = [f"--data.root={data}", f"--run={run}", f"--init={init}", *more]
    words += ["--task.warmup_steps=2", "--trainer.accelerator=cpu", "--data.batch_size=4"]
    return main(["train", *words])


def record(run):
    return json.loads((run / "init.json").read_text())


OF_DATA = {"energy_mean", "energy_std", "element_energies", "readout.by_contact"}
OF_DATA |= {"adds_baseline"}


def test_weights_and_options_are_those_of_the_source(others, source, tmp_path):
    run = tmp_path / "run"
    assert begin(others, run, source, *STILL) == 0
    was, now = weights(source, "best"), weights(run)
    assert set(was) == set(now)
    assert all(torch.equal(was[name], now[name]) for name in set(was) - OF_DATA)
    assert read_config(run)["model"] == read_config(source)["model"]
    assert read_config(run)["init"] == str(source)
    found = record(run)
    assert set(found["loaded"]) == set(was) - OF_DATA and set(found["of_data"]) == OF_DATA
    assert found["new"] == found["left_over"] == {} and found["recipe"] == "is2re"
    content = (source / "checkpoints" / "best.safetensors").read_bytes()
    assert found["sha256"] == hashlib.sha256(content).hexdigest()
    # the normalizer is computed from the new data
    labels = StructureStore(others / "train.safetensors").y_relaxed
    assert float(now["energy_mean"]) == pytest.approx(labels.mean(), abs=1e-12)
    assert float(now["energy_std"]) == pytest.approx(labels.std(), abs=1e-12)
    assert abs(float(now["energy_mean"] - was["energy_mean"])) > 1e-3
    kept = [f"--task.energy_mean={float(was['energy_mean'])}", "--task.energy_std=2"]
    begin(others, tmp_path / "kept", source, *STILL, *kept)
    assert float(weights(tmp_path / "kept")["energy_mean"]) == float(was["energy_mean"])


def test_the_readout_is_that_of_the_new_run(shared_run, others, source, tmp_path):
    """Weights saved by version 0.1 do not name a readout."""
    begin(others, tmp_path / "same", shared_run, *STILL, "--task.energy_mean=0")
    old = {k: v for k, v in weights(source).items() if k != "readout.by_contact"}
    save_file(old, tmp_path / "old.safetensors")
    words = ["--model.readout=contact", "--model.layers=2", *SMALL]
    begin(others, tmp_path / "contact", tmp_path / "old.safetensors", *STILL, *words)
    for name, expected in (("same", [True, False]), ("contact", [True, True])):
        found = weights(tmp_path / name)
        assert found["readout.by_contact"].tolist() == expected
        assert float(found["energy_mean"]) == 0


def test_references_are_fitted_again_or_omitted(shared_data, others, tmp_path):
    fit = ["--task.references=fit"]
    start(shared_data, tmp_path / "source", *STEPS, *fit, "--model.readout=all")
    begin(others, tmp_path / "without", tmp_path / "source", *STILL)
    begin(others, tmp_path / "fitted", tmp_path / "source", *STILL, *fit)
    begin(others, tmp_path / "alone", tmp_path / "source", *STILL, *fit, "--model.dim=24")
    found = {name: weights(tmp_path / name)["element_energies"] for name in ("source", "fitted")}
    assert found["source"].any() and not torch.equal(found["source"], found["fitted"])
    assert torch.equal(weights(tmp_path / "alone")["element_energies"], found["fitted"])
    assert not weights(tmp_path / "without")["element_energies"].any()


def test_references_adapt_the_initial_weights(shared_run, others, tmp_path, capsys):
    """Labels that differ from predictions by energies of the elements are fitted exactly."""
    model, data = molflt.load(shared_run), tmp_path / "data"
    shift = torch.linspace(-2.0, 3.0, 119, dtype=torch.float64)
    for split in ("train", "val_id"):
        records = list(StructureStore(others / f"{split}.safetensors"))
        for record, found in zip(records, model.predict(records), strict=True):
            adsorbed = record.atomic_numbers[record.tags == 2]
            record.y_relaxed = torch.tensor(found.energy + float(shift[adsorbed].sum()))
        write_store(data / f"{split}.safetensors", records)
    adapt = [*STILL, "--task.references=adapt"]
    assert begin(data, tmp_path / "run", shared_run, *adapt) == 0
    assert "an MAE of 0.000 eV on the labels" in capsys.readouterr().out
    dataset = StructureStore(data / "train.safetensors")
    energies = [one.energy for one in molflt.load(tmp_path / "run").predict(dataset)]
    assert energies == pytest.approx(dataset.y_relaxed, abs=1e-5)
    found = weights(tmp_path / "run")["element_energies"]
    fitted = {int(number) for number in found.nonzero()}
    assert fitted <= {int(z) for one in dataset for z in one.atomic_numbers[one.tags == 2]}
    assert float(weights(tmp_path / "run")["energy_std"]) != float(
        weights(shared_run, "best")["energy_std"]
    )


def test_tensors_that_do_not_fit_are_recorded(others, source, tmp_path, capsys):
    """The new model has one fewer layer, a radial summary, and a different width.

    A configuration names the source, and explicit options override options of the source.
    """
    run, file = tmp_path / "run", tmp_path / "tune.yaml"
    file.write_text(f"init: {source}\nmodel:\n  dropout: 0.1\n")
    more = ["--model.layers=1", "--model.radial_basis=8", "--model.ffn_dim=24"]
    more += ["--model.position_options.num_nodes=6", "--task.freeze", "embedding.*"]
    more += ["--task.warmup_steps=2", "--trainer.accelerator=cpu", f"--data.root={others}"]
    said = printed(capsys, "train", f"--config={file}", f"--run={run}", *STILL, *more).out
    found = record(run)
    assert found["new"]["embedding.radial.weight"]["why"] == "not in the source"
    assert any(one["why"].startswith("(16, 16)") for one in found["new"].values())
    assert found["left_over"] and all(".1." in name for name in found["left_over"])
    assert "embedding.radial.weight (16, 8)" in said and "ffn_dim 24, 16" in said
    was, now = weights(source, "best"), weights(run)
    assert f"energy_std, {float(was['energy_std']):.6g} eV in the source" in said
    assert all(torch.equal(was[name], now[name]) for name in found["loaded"])
    model = read_config(run)["model"]
    assert (model["dim"], model["layers"], model["dropout"]) == (16, 1, 0.1)
    assert model["position_options"] == {"num_nodes": 6, "num_gaussians": 4}


def test_a_later_configuration_removes_the_source(source, tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(f"init: {source}")
    second.write_text("init: null")
    words = [f"--config={first}", f"--config={second}", "--data.root=x"]
    config = build_parser(words).parse_args(words)
    assert (config.init, config.model.dim) == (None, 128)


def test_a_configuration_may_name_a_packaged_model(tmp_path):
    (tmp_path / "few.yaml").write_text("init: adsorption")
    words = [f"--config={tmp_path / 'few.yaml'}", "--data.root=x"]
    config = build_parser(words).parse_args(words)
    assert config.init == packaged("adsorption") and config.model.descriptors is True


def test_resuming_does_not_need_the_source(others, source, tmp_path):
    copy = shutil.copytree(source, tmp_path / "copy")
    words = ["--trainer.val_every=2", "--task.position_weight=1", "--task.position_weight_final=1"]
    words += ["--task.schedule=inverse_sqrt"]
    begin(others, tmp_path / "whole", copy, *words, "--trainer.max_steps=8")
    begin(others, tmp_path / "run", copy, *words, "--trainer.max_steps=4")
    names = ("init.json", "domain.json")
    before = [(tmp_path / "run" / name).read_bytes() for name in names]
    (tmp_path / "run" / "domain.json").unlink()
    shutil.rmtree(copy)
    assert resume(tmp_path / "run", "--trainer.max_steps=8") == 0
    one, other = last_state(tmp_path / "run"), last_state(tmp_path / "whole")
    assert differences(one["state_dict"], other["state_dict"]) == []
    assert [(tmp_path / "run" / name).read_bytes() for name in names] == before
    assert b'"initial"' in before[1]
    assert logged(tmp_path / "run", "val_mae_eV") == logged(tmp_path / "whole", "val_mae_eV")


def test_words_keep_their_vectors_only_with_the_same_vocabulary(tmp_path):
    """The recipe and the size of the vocabulary come from the source."""
    source, data = recipe_runs.trained("language"), recipe_runs.data_of("language")
    text = (data / "train.txt").read_text()
    (tmp_path / "other.txt").write_text(text.replace("cat", "cow").replace("one", "hen"))
    short = [f"--init={source}", f"--data.val={data / 'val.txt'}", *STILL]
    short += ["--data.length=16", "--data.batch_size=4", "--task.warmup_steps=2"]

    def tune(name, train, *more):
        run = f"--run={tmp_path / name}"
        assert main(["train", *short, f"--data.train={train}", run, *more]) == 0
        return record(tmp_path / name), weights(tmp_path / name)

    was = weights(source, "best")
    found, now = tune("same", data / "train.txt")
    assert found["new"] == {} and torch.equal(now["head.weight"], was["head.weight"])
    found, now = tune("other", tmp_path / "other.txt")
    assert "vocabulary.json" in found["new"]["head.weight"]["why"]
    assert not torch.equal(now["head.weight"], was["head.weight"])
    vocabulary = f"--data.vocabulary={source / 'vocabulary.json'}"
    found, now = tune("kept", tmp_path / "other.txt", vocabulary)
    assert found["new"] == {} and torch.equal(now["head.weight"], was["head.weight"])


def test_words_of_weights_without_a_record_of_the_vocabulary_are_loaded(tmp_path):
    run = recipe_runs.trained("language")
    save_file(weights(run, "best"), tmp_path / "plain.safetensors")
    source, model = read_saved(tmp_path / "plain.safetensors"), load_run(run, "last")[0]
    found = _transfer(source, model, {"vocabulary.json": b"{}"})
    assert found["new"] == {} and "head.weight" in found["loaded"]
    assert torch.equal(model.head.weight, weights(run, "best")["head.weight"])


def test_other_classes_get_new_logits(tmp_path):
    source, run = recipe_runs.trained("images"), tmp_path / "run"
    words = recipe_runs.words_of("images", run, *STILL, f"--init={source}")
    words = [{"frame": "ring"}.get(word, word) for word in words]
    assert main(words) == 0
    found = record(run)
    assert set(found["new"]) == {"head.weight", "head.bias"}
    assert set(found["of_data"]) == {"image_mean", "image_std"}
    assert torch.equal(weights(run)["embed.weight"], weights(source, "best")["embed.weight"])


FREEZE = ["--task.freeze", "embedding.*", "*.log_width", "--task.weight_decay=0.3"]
FREEZE += ["--task.lr=0.05", "--trainer.ema_decay=0.7", "--task.redraw_every=3"]


def test_frozen_parameters_do_not_move(others, source, tmp_path, capsys):
    run, steps = tmp_path / "run", ("--trainer.max_steps=9", "--trainer.val_every=4")
    assert begin(others, run, source, *steps, *FREEZE) == 0
    was, now = weights(source, "best"), weights(run)
    frozen = [n for n in was if n.startswith("embedding.") or n.endswith(".log_width")]
    assert len(frozen) > 2
    assert [name for name in frozen if not torch.equal(was[name], now[name])] == []
    parameters = last_state(run)["optimizer_states"][0]["param_groups"][0]["params"]
    moved = [name for name in was if not torch.equal(was[name], now[name])]
    assert {"readout.mlp.0.weight", "stack.norm.weight"} <= set(moved)
    current = last_state(run)["current_model_state"]
    assert all(torch.equal(current[f"model.{name}"], was[name]) for name in frozen)
    count = sum(was[name].numel() for name in frozen)
    assert f"{count:,} frozen" in capsys.readouterr().out
    assert len(parameters) < len(was) - len(frozen)
    assert resume(run, "--trainer.max_steps=11") == 0
    assert all(torch.equal(was[name], weights(run)[name]) for name in frozen)


def test_learning_rates_by_name(others, source, tmp_path):
    """The first step of Adam changes every weight by its learning rate."""
    run = tmp_path / "run"
    words = ["--trainer.max_steps=1", "--task.lr=1e-3", "--task.eps=1e-12"]
    factors = '{"readout.mlp.0.*": 0.1, "readout.*": 10}'
    words += ["--task.freeze", "embedding.tag.*", f"--task.lr_factors={factors}"]
    words += [f"--data.root={others}", f"--run={run}", f"--init={source}"]
    words += ["--task.warmup_steps=0", "--task.schedule=inverse_sqrt"]
    assert main(["train", *words, "--trainer.accelerator=cpu"]) == 0
    was, now = weights(source, "best"), weights(run)
    for name, factor in {
        "readout.mlp.0.bias": 0.1,
        "readout.mlp.2.bias": 10,
        "stack.norm.weight": 1,
        "embedding.tag.weight": 0,
    }.items():
        moved = (now[name] - was[name]).abs().max()
        assert float(moved) == pytest.approx(1e-3 * factor, rel=1e-3, abs=1e-9), name
    assert logged(run, "lr") == [1e-3]
    assert resume(run, "--trainer.max_steps=2") == 0
    rates = [group["lr"] for group in last_state(run)["optimizer_states"][0]["param_groups"]]
    assert sorted(rate / rates[0] for rate in rates) == pytest.approx([0.1, 1, 10], rel=1e-6)


SEEN = " (seen only by the initial weights)"


def of_elements(mapping: dict[int, int], count: int, seed: int):
    for one in structures(count, seed=seed, first_sid=1000 * seed):
        for old, new in mapping.items():
            one.atomic_numbers[one.atomic_numbers == old] = new
        yield one


@pytest.fixture(scope="module")
def gold(tmp_path_factory):
    swap = {29: 79, 78: 47, 8: 1}
    splits = {"train": of_elements(swap, 8, 3), "val_id": of_elements(swap, 4, 4)}
    return write_splits(tmp_path_factory.mktemp("gold"), **splits)


@pytest.fixture(scope="module")
def tuned(shared_run, gold, tmp_path_factory):
    run = tmp_path_factory.mktemp("tuned") / "run"
    assert begin(gold, run, shared_run, *STEPS) == 0
    return run


def held(run) -> Domain:
    return Domain.from_json(json.loads((run / "domain.json").read_text()), "domain.json")


def alone(root) -> Domain:
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
    told = printed(capsys, "predict", tuned, store, f"--out={tmp_path / 'out.csv'}").err
    assert f"Cu not in training{SEEN} (2 structures)" in told and "Ru not in training (2" in told
    cells = [row["outside"] for row in table(tmp_path / "out.csv")]
    assert all(cell.startswith(f"Cu not in training{SEEN}; Ru not in training") for cell in cells)


def test_start_from_the_first_model_of_an_ensemble(tuned, shared_run, gold, tmp_path, capsys):
    words = ["export", str(shared_run), str(tmp_path / "both"), "--also", str(tuned), *CARD]
    assert main(words) == 0
    for name, init in (("one", shared_run), ("first", tmp_path / "both")):
        begin(gold, tmp_path / name, init, *STILL)
    assert "the first of 2 models" in capsys.readouterr().out
    one, first = weights(tmp_path / "one"), weights(tmp_path / "first")
    assert one.keys() == first.keys() and all(torch.equal(one[key], first[key]) for key in one)


def test_elements_that_one_member_did_not_learn_are_new(tuned, shared_run):
    for runs in ([shared_run, tuned], [tuned, shared_run]):
        model, config = load_ensemble(runs)
        loaded = molflt.load(runs[0], also=runs[1:]).domain
        for domain in (loaded, EvaluationData(runs[0], config).domain(model)):
            assert domain.elements.all == {1} and domain.systems == held(runs[0]).systems


def test_chains_and_exports_keep_all_domains(tuned, shared_run, gold, tmp_path):
    assert main(["export", str(tuned), str(tmp_path / "export"), *CARD]) == 0
    begin(gold, tmp_path / "run", tmp_path / "export", *STILL)
    assert held(tmp_path / "run").initial == (alone(gold), held(shared_run))
    assert molflt.load(tmp_path / "run").domain == held(tmp_path / "run")


def test_a_missing_domain_of_the_source_gives_a_warning(copied_run, gold, tmp_path, capsys):
    """The source is a run or a weights file."""
    (copied_run / "domain.json").unlink()
    weights_file = copied_run / "checkpoints" / "best.safetensors"
    file = shutil.copy(weights_file, tmp_path / "w.safetensors")
    for name, init, more in (("a", copied_run, []), ("b", file, ["--model.dim=24"])):
        begin(gold, tmp_path / name, init, *STILL, *more)
        told = capsys.readouterr().err
        assert str(init) in told and "domain.json" in told
        assert held(tmp_path / name) == alone(gold)
    # elements of the source count only if its embedding is used; b has another width
    seen = [weights(tmp_path / name)["trained_elements"].nonzero().flatten() for name in "ab"]
    assert [one.tolist() for one in seen] == [[1, 8, 29, 47, 78, 79], [1, 47, 79]]


@pytest.mark.usefixtures("undrawn")
def test_evaluation_guesses_tags_as_training_did(tmp_path: Path, capsys) -> None:
    """The surface range of the packaged weights excludes the guess for slabs of six layers."""
    frames = []
    for layers in (2, 3, 4, 5, 6) * 2:
        frames.append(on_slab(layers=layers))
        frames[-1].rattle(0.01, seed=len(frames))
        frames[-1].set_tags(0)
        frames[-1].set_constraint()
        frames[-1].info = {"y_relaxed": -1.0 - 0.1 * len(frames)}
    write(tmp_path / "mine.extxyz", frames)
    run = f"--run={tmp_path / 'run'}"
    words = ["--config=few-labels", "--init=adsorption", "--data.tags=guess", run]
    words += [f"--data.root={tmp_path / 'mine.extxyz'}", "--data.val_fraction=0.4"]
    assert main(["train", *words, "--trainer.max_steps=1", "--trainer.accelerator=cpu"]) == 0
    assert main(["evaluate", str(tmp_path / "run"), "--device=cpu"]) == 0
    domain = tmp_path / "run" / "domain.json"
    domain.write_text(domain.read_text() + "\n")
    words = [f"--resume={tmp_path / 'run'}", "--trainer.max_steps=2"]
    said = printed(capsys, "train", *words, status=2).err
    assert "the data of this run have changed" in said and "start a new run" in said
