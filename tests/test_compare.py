"""scripts/compare.py: its statistics and its repetitions, with replaced trainings."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from script_files import Trainings, load_script

from molflt.data.structures.splits import VAL_SPLITS
from molflt.training import resume
from molflt.training.checkpoint import read_checkpoint


class Comparisons(Trainings):
    """Evaluations of two models of energies, and of language models."""

    def evaluate(self, run: Path) -> None:
        seed = int(run.name.removeprefix("seed"))
        if run.parent.name.startswith("other"):
            row = {"split": {run.parent.name.removeprefix("other-"): 2.0 + seed, "n": 3}}
            (run / "results.json").write_text(json.dumps(row))
            return
        if run.parent.name.startswith("tokens"):
            overflowed = "diverged" in run.parent.name and seed == 1
            row = {"perplexity": None if overflowed else 30.0 + 2 * seed, "nearest": None}
            (run / "results.json").write_text(json.dumps({"val": row, "test": row}))
            return
        mae = {"flt": 0.2, "performer": 0.5}[run.parent.name] + 0.01 * seed
        row = {"mae_eV": mae, "ewt_percent": 4.0 * seed, "baseline_mae_eV": 1.1, "n": 9}
        (run / "results.json").write_text(json.dumps(dict.fromkeys(VAL_SPLITS, row)))
        energies = {7: 0.03 * seed, 9: 0.03 * seed - 0.02}  # for a label of 0
        lines = [f"{split},{sid},{e},0" for split in VAL_SPLITS for sid, e in energies.items()]
        text = "\n".join(["split,sid,energy_eV,target_eV", *lines])
        (run / "predictions.csv").write_text(text)


@pytest.fixture
def compare(monkeypatch):
    module = load_script("compare")
    monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=Comparisons()))
    monkeypatch.setattr(module, "read_config", lambda run: {})
    monkeypatch.setattr(module, "count_parameters", lambda run, config: 10)
    monkeypatch.setattr(resume, "read_checkpoint", lambda path: {})
    return module


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "c.yaml").write_text("seed: 0\n")
    options = ["--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "out")]
    variants = [f"configs/atoms/{name}.yaml" for name in ("flt", "performer")]
    return [*options, "--variants", *variants, "--seeds", "0", "1", "2"]


def test_mean_and_spread(compare, words, tmp_path, capsys) -> None:
    more = ["--trainer.max_steps=7", "--init=runs/{variant}/seed{seed}"]
    assert compare.main([*words, "--", *more]) == 0
    trainings = compare.subprocess.run.commands
    assert len(trainings) == 12
    first = trainings[0]
    assert first[0] == "train" and "--trainer.max_steps=7" in first and "--seed=0" in first
    assert "--init=runs/flt/seed0" in first
    assert "configs/atoms/flt.yaml" in first
    text = capsys.readouterr().out
    assert text.strip() == (tmp_path / "out" / "comparison.md").read_text().strip()
    # 0.2, 0.21, 0.22 eV: sample standard deviation 0.01; EwT 0, 4, 8 %
    flt = next(line for line in text.splitlines() if line.startswith("| flt"))
    cells = ["10", "3", *["0.2100 ± 0.0100"] * 4, "4.0 ± 4.0"]
    assert [cell.strip() for cell in flt.split("|")[2:-1]] == cells
    assert "FLT / Performer: 0.412" in text  # 0.21 / 0.51
    means = [line for line in text.splitlines() if line.startswith("| their mean")]
    cells = ["", "3", *["0.0200"] * 4, "50.0"]  # errors of 0.03 and 0.01 eV
    assert [[cell.strip() for cell in line.split("|")[2:-1]] for line in means] == [cells] * 2
    assert len((tmp_path / "out" / "comparison.csv").read_text().splitlines()) == 1 + 2 * 3 * 4
    assert (tmp_path / "out" / "comparison.png").stat().st_size > 1000


def test_finished_runs_are_not_repeated(compare, words, tmp_path) -> None:
    compare.subprocess.run.broken = "evaluate " + str(tmp_path / "out" / "flt" / "seed1")
    assert compare.main(words) == 1
    compare.subprocess.run.broken = ""
    compare.subprocess.run.commands.clear()
    run = tmp_path / "out" / "flt" / "seed1"
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "last.ckpt").touch()
    assert compare.main(words) == 0
    done = compare.subprocess.run.commands
    assert done == [["train", "--resume", str(run)], ["evaluate", str(run)]]


def test_a_training_that_stopped_early_is_only_evaluated(compare, words, tmp_path, monkeypatch):
    run = tmp_path / "out" / "flt" / "seed1"
    compare.subprocess.run.broken = f"evaluate {run}"
    assert compare.main(words) == 1
    compare.subprocess.run.broken = ""
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "last.ckpt").touch()
    stopped = {"step": 10, "since": 2, "metric": "mae_eV", "best": 0.1, "best_step": 6}
    monkeypatch.setattr(resume, "read_checkpoint", lambda path: {"molflt": {"stopped": stopped}})
    compare.subprocess.run.commands.clear()
    assert compare.main(words) == 0
    assert compare.subprocess.run.commands == [["evaluate", str(run)]]


def test_a_damaged_checkpoint_is_named(compare, words, tmp_path, monkeypatch, capsys) -> None:
    compare.subprocess.run.broken = "evaluate"
    assert compare.main(words) == 1
    last = tmp_path / "out" / "flt" / "seed1" / "checkpoints" / "last.ckpt"
    last.parent.mkdir()
    last.write_text("damaged")
    monkeypatch.setattr(resume, "read_checkpoint", read_checkpoint)
    assert compare.main(words) != 0
    assert str(last) in capsys.readouterr().err


def test_other_options_are_refused(compare, words, capsys) -> None:
    assert compare.main(words) == 0
    compare.subprocess.run.commands.clear()
    assert compare.main([*words, "--", "--model.dim=8"]) == 2
    assert "other options" in capsys.readouterr().err
    Path(words[1]).write_text("seed: 1\n")
    assert compare.main(words) == 2
    assert compare.main(["--config", "nothing.yaml"]) == 2
    assert compare.subprocess.run.commands == []


def test_variants_are_files_with_changes(compare, words, tmp_path, capsys) -> None:
    file = tmp_path / "tokens.yaml"
    file.write_text("model: {}\n")
    variants = [str(file), f"{file},model.heads=2,model.position_options.num_nodes=8"]
    words = [*words[:4], "--variants", *variants, "--seeds", "0", "1"]
    assert compare.main(words) == 0
    trained = [c for c in compare.subprocess.run.commands if c[0] == "train"]
    assert trained[1][-5:-1] == [
        *("--config", str(file), "--model.heads=2", "--model.position_options.num_nodes=8")
    ]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| variant | parameters | seeds | val perplexity | test perplexity |"
    assert lines[2] == "| tokens | 10 | 2 | 31.00 ± 1.41 | 31.00 ± 1.41 |"
    assert lines[3].startswith("| tokens,heads=2,num_nodes=8 | 10 |")
    file.write_text("model: {heads: 2}\n")
    assert compare.main(words) == 2
    assert compare.main([*words[:4], "--variants", "fly"]) == 2
    assert "variant 'fly'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "heading"),
    [
        ("force_mae_meV_per_A", "force MAE, meV/Å"),
        ("pearson_percent", "Pearson, %"),
    ],
)
def test_runs_of_every_recipe_have_a_measure(compare, words, tmp_path, capsys, name, heading):
    file = tmp_path / f"other-{name}.yaml"
    file.write_text("model: {}\n")
    assert compare.main([*words[:4], "--variants", str(file), "--seeds", "0", "1"]) == 0
    assert f"| split {heading} |" in capsys.readouterr().out
    assert (name in compare.LARGE_IS_GOOD) == name.endswith("percent")


def test_unknown_measures_are_refused(compare, words, tmp_path, capsys) -> None:
    file = tmp_path / "other-speed.yaml"
    file.write_text("model: {}\n")
    assert compare.main([*words[:4], "--variants", str(file)]) == 2
    assert "got speed, n" in capsys.readouterr().err


def test_variants_of_one_name_are_refused(compare, words, capsys) -> None:
    assert compare.name_of("a/flt.yaml,task.noise=0.1") == "flt,noise=0.1"
    assert compare.name_of("a/flt.yaml,task.betas=[0.9]") == "flt,betas=[0.9]"
    twice = ["configs/atoms/flt.yaml", "configs/other/flt.yaml"]
    assert compare.main([*words[:4], "--variants", *twice]) == 2
    assert "--variants" in (err := capsys.readouterr().err) and "flt" in err
    assert compare.subprocess.run.commands == []


def test_runs_on_other_data_are_not_averaged(compare, words, tmp_path, capsys, monkeypatch) -> None:
    assert compare.main(words) == 0
    for seed in range(3):
        last = tmp_path / "out" / "flt" / f"seed{seed}" / "checkpoints" / "last.ckpt"
        last.parent.mkdir()
        last.touch()
    data = {seed: {"train": {"structures": 1000 + 2000 * (seed == 2)}} for seed in range(3)}

    def read(path: Path) -> dict:
        return {"molflt": {"data": data[int(path.parts[-3].removeprefix("seed"))]}}

    monkeypatch.setattr(resume, "read_checkpoint", read)
    assert compare.main(words) == 2
    err = capsys.readouterr().err
    assert "flt/seed2" in err and "other data" in err and "flt/seed0" in err
    data[2] = data[0]
    assert compare.main(words) == 0


def test_systems_without_labels_do_not_count(compare, words, tmp_path, capsys) -> None:
    assert compare.main(words) == 0
    for path in (tmp_path / "out").rglob("predictions.csv"):
        lines = path.read_text().splitlines()
        kept = [lines[0], *(line for line in lines[1:] if not line.startswith("val_ood_cat"))]
        path.write_text("\n".join([*kept, "val_ood_cat,7,0.5,", "val_id,8,0.5,"]))
        results = json.loads((path.parent / "results.json").read_text())
        results["val_ood_cat"] |= dict.fromkeys(("mae_eV", "ewt_percent", "baseline_mae_eV"))
        (path.parent / "results.json").write_text(json.dumps(results))
    capsys.readouterr()
    assert compare.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    means = [line for line in lines if line.startswith("| their mean")]
    assert means == 2 * ["| their mean |  | 3 | 0.0200 | 0.0200 | – | 0.0200 | 50.0 |"]
    assert lines[-3 if "FLT" in lines[-1] else -1].count("–") == 1


def test_a_row_that_diverged_in_one_seed_has_no_mean(compare, words, tmp_path, capsys) -> None:
    """Perplexities that overflow are null in results.json."""
    files = [tmp_path / "tokens-diverged.yaml", tmp_path / "tokens.yaml"]
    for file in files:
        file.write_text("model: {}\n")
    words = [*words[:4], "--variants", *map(str, files), "--seeds", "0", "1"]
    assert compare.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| tokens-diverged | 10 | 2 | – | – |"
    assert lines[3] == "| tokens | 10 | 2 | 31.00 ± 1.41 | 31.00 ± 1.41 |"
    (tmp_path / "out" / "comparison.png").unlink()
    assert compare.main([*words[:5], str(files[0]), *words[7:]]) == 0
    assert "| tokens-diverged | 10 | 2 | – | – |" in capsys.readouterr().out
    assert not (tmp_path / "out" / "comparison.png").exists()
