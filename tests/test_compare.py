import json
from pathlib import Path

import pytest
from script_files import Trainings, cells, load_script

from molflt.data.structures.splits import VAL_SPLITS
from molflt.training import run_folder

COMPARE = load_script("compare")


class Comparisons(Trainings):
    def evaluate(self, run: Path) -> None:
        seed = int(run.name.removeprefix("seed"))
        rows = {"split": {"speed": 2.0, "n": 3}}
        if run.parent.name.startswith("tokens"):
            overflowed = "diverged" in run.parent.name and seed == 1
            row = {"perplexity": None if overflowed else 30.0 + 2 * seed, "nearest": None}
            rows = {"val": row, "test": row}
        elif run.parent.name in ("flt", "performer"):
            mae = {"flt": 0.2, "performer": 0.5}[run.parent.name] + 0.01 * seed
            row = {"mae_eV": mae, "ewt_percent": 4.0 * seed, "baseline_mae_eV": 1.1, "n": 9}
            rows = dict.fromkeys(VAL_SPLITS, row)
            energies = {7: 0.03 * seed, 9: 0.03 * seed - 0.02}  # for a label of 0
            lines = [f"{split},{sid},{e},0" for split in VAL_SPLITS for sid, e in energies.items()]
            text = "\n".join(["split,sid,energy_eV,target_eV", *lines])
            (run / "predictions.csv").write_text(text)
        (run / "results.json").write_text(json.dumps(rows))


@pytest.fixture
def trainings(monkeypatch) -> Trainings:
    monkeypatch.setattr(COMPARE, "read_config", lambda run: {})
    monkeypatch.setattr(COMPARE, "count_parameters", lambda run, config: 10)
    monkeypatch.setattr(run_folder, "read_checkpoint", lambda path: {})
    return Comparisons().replace(monkeypatch)


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "c.yaml").write_text("seed: 0\n")
    for name in ("tokens", "tokens-diverged", "other"):
        (tmp_path / f"{name}.yaml").write_text("model: {}\n")
    options = ["--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "out")]
    variants = [f"configs/atoms/{name}.yaml" for name in ("flt", "performer")]
    return [*options, "--variants", *variants, "--seeds", "0", "1", "2"]


def test_mean_and_spread(trainings, words, tmp_path, capsys) -> None:
    more = ["--trainer.max_steps=7", "--init=runs/{variant}/seed{seed}"]
    assert COMPARE.main([*words, "--", *more]) == 0
    assert len(trainings.commands) == 12
    first = trainings.commands[0]
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
    trained = [c for c in trainings.commands if c[0] == "train"]
    changes = ["--model.heads=2", "--model.position_options.num_nodes=8"]
    assert trained[1][-5:-1] == ["--config", file, *changes]
    text = capsys.readouterr().out
    assert text.startswith("| variant | parameters | seeds | val perplexity | test perplexity |")
    found = cells(text)
    assert found["tokens"] == ["10", "2", "31.00 ± 1.41", "31.00 ± 1.41"]
    assert found["tokens,heads=2,num_nodes=8"] == found["tokens"]
    assert found["tokens-diverged"] == ["10", "2", "–", "–"]
