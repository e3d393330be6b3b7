"""Split names, counts, checksums and published results for OC20 IS2RE."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "OC20_ARCHIVE",
    "OC20_FILES",
    "PUBLISHED",
    "SPLITS_IN_ORDER",
    "TEST_SPLITS",
    "VAL_SPLITS",
]

VAL_SPLITS = ("val_id", "val_ood_ads", "val_ood_cat", "val_ood_both")
TEST_SPLITS = ("test_id", "test_ood_ads", "test_ood_cat", "test_ood_both")
SPLITS_IN_ORDER = ("train", *VAL_SPLITS, *TEST_SPLITS)


class _Oc20File(NamedTuple):
    """LMDB file in the official download."""

    records: int
    gigabytes: float


class _Archive(NamedTuple):
    """Published archive; `inner` is the path of the splits inside it."""

    base_url: str
    name: str
    md5: str
    inner: str


OC20_ARCHIVE = _Archive(  # contains all IS2RE and IS2RS splits (CC-BY-4.0)
    base_url="https://dl.fbaipublicfiles.com/opencatalystproject/data",
    name="is2res_train_val_test_lmdbs.tar.gz",
    md5="cfc04dd2f87b4102ab2f607240d25fb1",
    inner="is2res_train_val_test_lmdbs/data/is2re",
)

# Sizes of the validation and test files are upper bounds.
OC20_FILES = {
    "10k/train": _Oc20File(10_000, 1.35),
    "100k/train": _Oc20File(100_000, 13.5),
    "all/train": _Oc20File(460_328, 62.0),
    "all/val_id": _Oc20File(24_943, 3.8),
    "all/val_ood_ads": _Oc20File(24_961, 3.8),
    "all/val_ood_cat": _Oc20File(24_963, 3.8),
    "all/val_ood_both": _Oc20File(24_987, 3.8),
    "all/test_id": _Oc20File(24_948, 3.6),
    "all/test_ood_ads": _Oc20File(24_930, 3.6),
    "all/test_ood_cat": _Oc20File(24_965, 3.6),
    "all/test_ood_both": _Oc20File(24_985, 3.6),
}


class _Published(NamedTuple):
    """Published validation result: MAE on each split, in eV, and EwT on val_id, in percent."""

    model: str
    setting: str
    val_id: float
    val_ood_ads: float | None = None
    val_ood_cat: float | None = None
    val_ood_both: float | None = None
    ewt_id: float | None = None


_DIRECT, _NODES, _10K = "direct", "with the relaxed-position task", "direct, 10k"
PUBLISHED = (
    _Published("CGCNN", _DIRECT, 0.6203, 0.7426, 0.6001, 0.6708, 3.36),
    _Published("SchNet", _DIRECT, 0.6465, 0.7074, 0.6475, 0.6626, 2.96),
    _Published("DimeNet++", _DIRECT, 0.5636, 0.7127, 0.5612, 0.6492, 4.25),
    _Published("GemNet-T", _DIRECT, 0.5561, 0.7342, 0.5659, 0.6964, 4.51),
    _Published("Equiformer", _DIRECT, 0.5088, 0.6271, 0.5051, 0.5545, 4.88),
    _Published("Performer-12L", _DIRECT, 0.5454, ewt_id=4.90),
    _Published("FLT-12L", _DIRECT, 0.5046, ewt_id=5.33),
    _Published("3D-Graphormer", _NODES, 0.4329, 0.5850, 0.4441, 0.5299),
    _Published("GNS + noisy nodes", _NODES, 0.47, 0.51, 0.48, 0.46),
    _Published("Equiformer + noisy nodes", _NODES, 0.4156, 0.4976, 0.4165, 0.4344, 7.47),
    _Published("GeoMFormer", _NODES, 0.3883, 0.4562, 0.4037, 0.4083, 11.26),
    _Published("CGCNN", _10K, 0.988),
    _Published("SchNet", _10K, 1.059),
    _Published("DimeNet++", _10K, 0.884),
)
