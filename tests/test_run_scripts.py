"""Scripts that train and evaluate in other processes, which the tests replace."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from data.game_net_files import content, write_archive
from kit.runs import finished
from kit.systems import System, read_systems, write_systems
from script_files import cells, load_script
from tiny_run import table

from molflt.data.structures.sources import VAL_SPLITS
from molflt.files import save_tensors
from molflt.training import run_folder

Commands = list[list[str]]  # words after `python -m molflt`


def words_in(folder: Path) -> list[str]:
    """Writes a configuration, and returns the options of a script that uses folders in `folder`."""
    (folder / "c.yaml").write_text("seed: 0\n")
    options = {"config": "c.yaml", "data": "data", "out": "out"}
    return [word for name, path in options.items() for word in (f"--{name}", str(folder / path))]


def write_evaluation(run: Path, rows: Iterable[tuple[str, int, float, float]]) -> None:
    """Writes predictions.csv with (split, sid, energy, label) in each row, and results.json."""
    lines = ["split,sid,energy_eV,target_eV", *(",".join(map(str, row)) for row in rows)]
    (run / "predictions.csv").write_text("\n".join(lines))
    (run / "results.json").write_text("{}")


def trainings_of(monkeypatch, evaluate: Callable[[Path, Commands], None]) -> Commands:
    """Replaces `subprocess.run` in all scripts, and returns a list of its commands.

    Args:
        monkeypatch: pytest's fixture.
        evaluate: function of a run and all commands that writes the files of an evaluation.
    """
    commands: Commands = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command[3:])
        if command[3] == "evaluate":
            evaluate(Path(command[4]), commands)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("kit.runs.subprocess", SimpleNamespace(run=run))
    return commands


COMPARE = load_script("compare")


def compared(run: Path, _: Commands) -> None:
    seed = int(run.name.removeprefix("seed"))
    if run.parent.name.startswith("tokens"):
        overflowed = "diverged" in run.parent.name and seed == 1
        row = {"perplexity": None if overflowed else 30.0 + 2 * seed, "nearest": None}
        rows = {"val": row, "test": row}
    else:
        mae = {"flt": 0.2, "performer": 0.5}[run.parent.name] + 0.01 * seed
        row = {"mae_eV": mae, "ewt_percent": 4.0 * seed, "baseline_mae_eV": 1.1, "n": 9}
        rows = dict.fromkeys(VAL_SPLITS, row)
        energies = {7: 0.03 * seed, 9: 0.03 * seed - 0.02}  # for a label of 0
        found = [(split, sid, e, 0) for split in VAL_SPLITS for sid, e in energies.items()]
        write_evaluation(run, found)
    (run / "results.json").write_text(json.dumps(rows))


@pytest.fixture
def trainings(monkeypatch) -> Commands:
    monkeypatch.setattr(COMPARE, "read_config", lambda run: {})
    monkeypatch.setattr(COMPARE, "count_parameters", lambda run, config: 10)
    monkeypatch.setattr(run_folder, "read_checkpoint", lambda path: {})
    return trainings_of(monkeypatch, compared)


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "c.yaml").write_text("seed: 0\n")
    for name in ("tokens", "tokens-diverged"):
        (tmp_path / f"{name}.yaml").write_text("model: {}\n")
    options = ["--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "out")]
    variants = [f"configs/atoms/{name}.yaml" for name in ("flt", "performer")]
    return [*options, "--variants", *variants, "--seeds", "0", "1", "2"]


def test_mean_and_spread(trainings, words, tmp_path, capsys) -> None:
    more = ["--trainer.max_steps=7", "--init=runs/{variant}/seed{seed}"]
    assert COMPARE.main([*words, "--", *more]) == 0
    assert len(trainings) == 12
    first = trainings[0]
    assert first[0] == "train" and {"--trainer.max_steps=7", "--seed=0"} < {*first}
    assert {"--init=runs/flt/seed0", "configs/atoms/flt.yaml"} < {*first}
    text = capsys.readouterr().out
    assert text.strip() == (tmp_path / "out" / "comparison.md").read_text().strip()
    # 0.2, 0.21, 0.22 eV: sample standard deviation 0.01; EwT 0, 4, 8 %
    assert cells(text)["flt"] == ["10", "3", *["0.2100 ± 0.0100"] * 4, "4.0 ± 4.0"]
    means = ["", "3", *["0.0200"] * 4, "50.0"]  # errors of 0.03 and 0.01 eV
    assert cells(text)["their mean"] == means and text.count("| their mean |") == 2
    assert len((tmp_path / "out" / "comparison.csv").read_text().splitlines()) == 1 + 2 * 3 * 4
    assert (tmp_path / "out" / "comparison.png").stat().st_size > 1000


def test_variants_are_files_with_changes(trainings, words, tmp_path, capsys) -> None:
    """A variant that diverged with one seed has no mean: overflowing perplexities are null."""
    file = str(tmp_path / "tokens.yaml")
    variants = [file, f"{file},model.heads=2,model.position_options.num_nodes=8"]
    variants.append(str(tmp_path / "tokens-diverged.yaml"))
    assert COMPARE.main([*words[:4], "--variants", *variants, "--seeds", "0", "1"]) == 0
    trained = [c for c in trainings if c[0] == "train"]
    changes = ["--model.heads=2", "--model.position_options.num_nodes=8"]
    assert trained[1][-5:-1] == ["--config", file, *changes]
    text = capsys.readouterr().out
    assert text.startswith("| variant | parameters | seeds | val perplexity | test perplexity |")
    found = cells(text)
    assert found["tokens"] == ["10", "2", "31.00 ± 1.41", "31.00 ± 1.41"]
    assert found["tokens,heads=2,num_nodes=8"] == found["tokens"]
    assert found["tokens-diverged"] == ["10", "2", "–", "–"]


def test_results_before_the_last_step_are_not_final(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("kit.runs.read_config", lambda run: {"trainer": {"max_steps": 7}})
    write_evaluation(tmp_path, [])
    for step in (3, 7):
        save_tensors(tmp_path / "checkpoints" / "last.safetensors", {}, {"step": f"{step}"})
        assert finished(tmp_path) == (step == 7)


# --- folds ----------------------------------------------------------------------------------------

FOLDS = load_script("folds")
LABELS = {1: 0.5, 2: -1.0, 3: 2.0, 4: 0.0}  # sid -> eV; 1, 2 in the first test fold
ENERGIES = {  # folder -> sid -> eV
    "test0-val1": {1: 0.7, 2: -1.1},
    "test0-val2": {1: 0.5, 2: -0.7},
    "test1-val0": {3: 2.3, 4: -0.1},
    "test1-val2": {3: 1.9, 4: 0.1},
}


def of_folds(run: Path, _: Commands) -> None:
    rows = [("test_id", sid, energy, LABELS[sid]) for sid, energy in ENERGIES[run.name].items()]
    write_evaluation(run, [("val_id", 9, 100.0, 0.0), *rows])


@pytest.mark.parametrize(
    ("names", "energies"), [("aa", {"m": np.ones(2)}), ("ab", {"m": np.ones((3, 2))}), ("ab", {})]
)
def test_published_energies_belong_to_one_system_each(tmp_path, names, energies):
    np.savez(tmp_path / "p.npz", name=np.array([*names]), **energies)
    with pytest.raises(ValueError, match=r"p\.npz: expected unique names"):
        FOLDS.read_published(tmp_path / "p.npz")


def test_single_models_and_ensembles_with_published_ones(monkeypatch, tmp_path, capsys):
    for name, own in ENERGIES.items():
        folder = tmp_path / "data" / name
        folder.mkdir(parents=True)
        (folder / "train.safetensors").touch()
        systems = [System(sid, f"s{sid}", "m", f"family{sid % 2}", "Cu") for sid in own]
        write_systems(folder, [("test_id", systems)])
    trainings, path = trainings_of(monkeypatch, of_folds), tmp_path / "published.npz"
    order = [4, 3, 2, 1]
    other = np.array([[LABELS[sid] + 0.4, LABELS[sid] - 0.2] for sid in order])
    np.savez(path, name=np.array([f"s{sid}" for sid in order]), other=other, fold=np.arange(4))
    words = [*words_in(tmp_path), "--published", str(path), "--", "--trainer.max_steps=7"]
    assert FOLDS.main(words) == 0
    train = next(words for words in trainings if words[0] == "train")
    assert train[0] == "train" and "--trainer.max_steps=7" in train and "--seed=0" in train
    assert any(word.startswith("--data.root=") for word in train)
    text = capsys.readouterr().out
    assert text.startswith("4 training runs")
    assert text == (tmp_path / "out" / "folds.md").read_text()
    found = cells(text)
    # single: errors .2 .1, 0 .3 | .3 .1, .1 .1; means of two: .1 .1 | .1 0
    assert found["molflt"][:4] == ["2", "4", "0.1500", "0.1500 ± 0.0000"]
    assert found["molflt"][4] == "0.0750" and found["molflt"][6] == "25.0"
    assert found["other"][2] == "0.3000" and found["other"][4] == "0.1000"
    assert found["family0"] == ["2", "0.050", "0.100"] and found["family1"][1] == "0.100"
    assert len((tmp_path / "out" / "folds.csv").read_text().splitlines()) == 1 + 2 * 4
    assert (tmp_path / "out" / "folds.png").stat().st_size > 1000


# --- groups that are held out ---------------------------------------------------------------------

HELD_OUT = load_script("held_out")
OFF = {"val_id": 0.01, "val_ood_ads": 0.2, "val_ood_cat": 0.3, "val_ood_both": 0.4}


def split_of(folder: Path) -> dict[int, str]:
    return {int(row["sid"]): row["split"] for row in table(folder / "systems.csv")}


def of_groups(run: Path, commands: Commands) -> None:
    """Replaces evaluations; errors are known for each split and twice as large on Cu."""
    root = next(
        word.partition("=")[2]
        for words in commands
        for word in words
        if str(run) in words and word.startswith("--data.root=")
    )
    systems, rows = read_systems(Path(root)), []
    for sid, split in split_of(Path(root)).items():
        if split in OFF:
            off = OFF[split] * (1 + (systems[sid].metal == "Cu"))
            rows.append((split, sid, -1.0 + off, -1.0))
    write_evaluation(run, rows)


def test_each_system_is_new_once_by_family_and_once_by_metal(monkeypatch, tmp_path, capsys):
    pytest.importorskip("sklearn", reason="kernel ridge needs scikit-learn, extra bench")
    write_archive(tmp_path / "FG.tar.xz", content())
    trainings_of(monkeypatch, of_groups)
    words = [str(tmp_path / "FG.tar.xz"), *words_in(tmp_path)]
    assert HELD_OUT.main([*words, "--groups", "2", "--seeds", "0", "1"]) == 0
    new = {"val_ood_ads": [], "val_ood_cat": [], "val_ood_both": []}
    for folder in (tmp_path / "data").iterdir():
        systems = read_systems(folder)
        trained = {systems[sid] for sid, split in split_of(folder).items() if split == "train"}
        for sid, split in split_of(folder).items():
            if split in new:
                new[split].append(sid)
                same = (systems[sid].family, systems[sid].metal)
                seen = ({s.family for s in trained}, {s.metal for s in trained})
                assert [a in b for a, b in zip(same, seen, strict=True)] == [
                    split == "val_ood_cat",
                    split == "val_ood_ads",
                ]
    for split in ("val_ood_ads", "val_ood_cat"):
        assert sorted(new[split] + new["val_ood_both"]) == list(range(30))

    text = capsys.readouterr().out
    lines = cells(text)
    assert lines["molflt"][0] == "2" and lines["molflt"][1].endswith("± 0.0000")
    expected = np.mean([0.3 * (1 + (sid // 10 == 1)) for sid in new["val_ood_cat"]])
    assert lines["molflt"][3] == f"{expected:.4f} ± 0.0000"
    assert lines["Cu"][1] == "0.600" and lines["Ag"][1] == "0.300"
    assert {"kernel-ridge", "median", "amides", "oximes", "Ni"} <= lines.keys()
    assert text.endswith((tmp_path / "out" / "held_out.md").read_text())
    rows = table(tmp_path / "out" / "held_out.csv")
    assert {row["model"] for row in rows} == {"molflt", "kernel-ridge", "median"}
    (tmp_path / "out" / "1-of-2" / "seed1" / "results.json").unlink()
    failing = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=1))
    monkeypatch.setattr("kit.runs.subprocess", failing)
    assert HELD_OUT.main([*words, "--groups", "2", "--seeds", "0", "1"]) == 1
    rows = table(tmp_path / "out" / "held_out.csv")
    assert {row["group"] for row in rows} == {"0-of-2"}


# --- learned optimizers ---------------------------------------------------------------------------


def of_optimizers(run: Path, _: Commands) -> None:
    """Writes a final loss and a curve for each run; seed 1 of lstm has diverged."""
    diverged = run == run.parent / "seed1" and run.parent.name == "lstm"
    end = None if diverged else 10.0 ** -int(run.name[-1])
    (run / "results.json").write_text(json.dumps({"factorization": {"final_loss": end}}))
    rows = [f"factorization,run,,0,{step},{2 - step / 9}" for step in (0.5, 2.5, 4.5)]
    (run / "curves.csv").write_text("\n".join(["task,optimizer,tuned,repeat,step,loss", *rows]))


def test_the_table_and_a_second_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, trainings = load_script("optimizers"), trainings_of(monkeypatch, of_optimizers)
    words = ["--out", str(tmp_path), "--memories", "flt", "lstm", "--seeds", "0", "1"]
    words += ["--tasks", "factorization", "--steps", "6", "--repeats", "2"]
    assert script.main(words) == 0
    evaluated = [own for own in trainings if own[0] == "evaluate"]
    assert len(evaluated) == 4 and evaluated[0][2:] == [
        *("--steps", "6", "--repeats", "2", "--rates=[]", "--tasks", "factorization")
    ]
    text = (tmp_path / "optimizers.md").read_text()
    assert "| flt | 2 | 0.3162 ± 0.71 |" in text and "| lstm | 2 | diverged |" in text
    assert "| Adam, tuned | 1 | " in text and (tmp_path / "optimizers.png").is_file()
    rows = table(tmp_path / "optimizers.csv")
    adam = [row for row in rows if row["optimizer"] == "Adam, tuned"]
    assert len(adam) == 2 * 6 and len(rows) == len(adam) + 4 * 3
    trainings.clear()
    monkeypatch.setattr(script, "tuned_adam", None)
    assert script.main(words) == 0 and not trainings
    assert script.main([*words[:-1], "3"]) == 2  # existing results have other options
