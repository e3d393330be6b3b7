"""Split names, counts and checksums for OC20 IS2RE."""

from typing import NamedTuple

VAL_SPLITS = ("val_id", "val_ood_ads", "val_ood_cat", "val_ood_both")
TEST_SPLITS = ("test_id", "test_ood_ads", "test_ood_cat", "test_ood_both")
SPLITS_IN_ORDER = ("train", *VAL_SPLITS, *TEST_SPLITS)


class _Oc20File(NamedTuple):
    records: int
    gigabytes: float


class _Archive(NamedTuple):
    """Published archive; `inner` is the path of the splits inside it."""

    base_url: str
    name: str
    md5: str
    inner: str = ""


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
