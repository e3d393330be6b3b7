"""scripts/wwl_simple.py: the folds that it writes."""

import json
from pathlib import Path

import numpy as np
from ase.build import add_adsorbate, fcc111
from ase.io import write
from script_files import load_script

from molflt.data.structures import open_dataset


def test_each_fold_is_judged_once(tmp_path: Path) -> None:
    frames, names = [], [f"system{i}" for i in range(30)]
    for i, name in enumerate(names):
        atoms = fcc111("Cu", (1, 1, 3), vacuum=6.0, periodic=True)
        add_adsorbate(atoms, "O", height=1.2, position="fcc")
        atoms.set_tags([0, 1, 1, 2])
        atoms.arrays["fixed"] = np.array([True, False, False, False])
        atoms.info = {"name": name, "adsorbate": "O", "facet": 111, "metal": "Cu"}
        atoms.info["y_relaxed"] = 0.1 * i
        frames.append(atoms)
    write(tmp_path / "all.extxyz", frames)
    folds = {str(k): names[k::3] for k in range(3)}
    (tmp_path / "folds.json").write_text(json.dumps(folds))
    words = [str(tmp_path / name) for name in ("all.extxyz", "folds.json", "out")]
    assert load_script("wwl_simple").main(words) == 0
    judged = []
    for k in range(3):
        folder = tmp_path / "out" / f"test{k}-val0"
        sids = {
            split: {int(record.sid) for record in open_dataset(folder / f"{split}.safetensors")}
            for split in ("train", "val_id", "test_id")
        }
        assert sorted(map(len, sids.values())) == [2, 10, 18]
        assert set.union(*sids.values()) == set(range(30))
        assert sids["test_id"] == {names.index(name) for name in folds[str(k)]}
        assert open_dataset(folder / "test_id.safetensors")[0].y_relaxed == 0.1 * min(
            sids["test_id"]
        )
        judged += sids["test_id"]
    assert sorted(judged) == list(range(30))
