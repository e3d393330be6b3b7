"""Where splits are found, and that the table of OC20 files is consistent."""

from __future__ import annotations

from pathlib import Path

import pytest
from oc20_files import SHARED

from molflt.data.structures.sources import split_path
from molflt.data.structures.splits import OC20_FILES, TEST_SPLITS, VAL_SPLITS


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


@pytest.mark.parametrize("below", ["is2re", "is2res_train_val_test_lmdbs/data/is2re"])
def test_layouts_of_the_download(tmp_path, below):
    base = tmp_path / below
    touch(base / "10k/train/data.lmdb", base / "all/val_id/data.lmdb")
    for root in (tmp_path, base, base / "10k"):
        assert split_path(root, "train") == base / "10k/train"
        assert split_path(root, "val_id") == base / "all/val_id"
    assert split_path(tmp_path, "10k/train") == base / "10k/train"
    touch(base / "all/train/data.lmdb")
    with pytest.raises(ValueError, match=r"several train splits: .*10k/train, .*all/train"):
        split_path(tmp_path, "train")
    assert split_path(base / "10k", "train") == base / "10k/train"
    assert split_path(base / "all", "train") == base / "all/train"


def test_table_names_every_split_with_published_sums():
    names = ["10k/train", "100k/train", "all/train"]
    names += [f"all/{split}" for split in VAL_SPLITS + TEST_SPLITS]
    assert list(OC20_FILES) == names
    sums = SHARED / "oc20_lmdb_md5sums.txt"
    if not sums.is_file():
        pytest.skip(f"the published md5 sums are not at {sums}")
    published = dict(reversed(line.split()) for line in sums.read_text().splitlines())
    for name, file in OC20_FILES.items():
        assert published[f"is2re/{name}/data.lmdb"] == file.md5
