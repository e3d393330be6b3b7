"""Fixtures of the tests of the data package."""

from __future__ import annotations

from pathlib import Path

import pytest
from oc20_files import SHARED


@pytest.fixture
def real_lmdb() -> Path:
    path = SHARED / "oc20_is2re_val20.lmdb"
    if not path.is_file():
        pytest.skip(f"the 20 genuine OC20 records are not at {path}")
    return path
