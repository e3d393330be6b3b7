import csv
import sys
from pathlib import Path

import numpy as np
import pytest
from script_files import Trainings, cells, load_script
from tiny_run import table

from molflt.data.structures.systems import read_systems

sys.path.append(str(Path(__file__).parent / "data"))
from game_net_files import content, write_archive

HELD_OUT = load_script("held_out")
OFF = {"val_id": 0.01, "val_ood_ads": 0.2, "val_ood_cat": 0.3, "val_ood_both": 0.4}


def split_of(folder: Path) -> dict[int, str]:
    return {int(row["sid"]): row["split"] for row in table(folder / "systems.csv")}


class Groups(Trainings):
    """Replaces evaluations; errors are known for each split and twice as large on Cu."""

    def evaluate(self, run: Path) -> None:
        root = next(
            word.partition("=")[2]
            for words in self.commands
            for word in words
            if str(run) in words and word.startswith("--data.root=")
        )
        systems = read_systems(Path(root))
        with open(run / "predictions.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["split", "sid", "energy_eV", "target_eV"])
            for sid, split in split_of(Path(root)).items():
                if split in OFF:
                    off = OFF[split] * (1 + (systems[sid].metal == "Cu"))
                    writer.writerow([split, sid, -1.0 + off, -1.0])
        (run / "results.json").write_text("{}")


@pytest.fixture
def trainings(monkeypatch, tmp_path) -> Trainings:
    write_archive(tmp_path / "FG.tar.xz", content())
    pytest.importorskip("sklearn", reason="kernel ridge needs scikit-learn, extra bench")
    (tmp_path / "c.yaml").write_text("seed: 0\n")
    return Groups().replace(monkeypatch)


@pytest.fixture
def words(tmp_path) -> list[str]:
    options = {"config": "c.yaml", "data": "data", "out": "out"}
    own = [word for name, path in options.items() for word in (f"--{name}", str(tmp_path / path))]
    return [str(tmp_path / "FG.tar.xz"), *own]


def test_each_system_is_new_once_by_family_and_once_by_metal(trainings, words, tmp_path, capsys):
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
