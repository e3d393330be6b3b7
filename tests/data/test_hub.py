"""Hugging Face `datasets` itself, on folders of this machine: no name leaves it.

The package refuses names of folders on this machine, which this test lets through.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]

LOCAL = """
import molflt.data.text.sources as texts, molflt.data.images.files as images, datasets
texts.dataset_loader = images.dataset_loader = lambda source: datasets.load_dataset
"""
TEXT = """
from molflt.data.text.datamodule import TextData
data = TextData("hf:texts:train.text", "hf:texts:test", length=4, batch_size=1)
data.setup()
print([blocks.tokens for blocks in data.datasets.values()], data.vocabulary.tokens)
"""
IMAGES = """
from molflt.data.images.datamodule import ImageData
data = ImageData("hf:pictures:train", "hf:pictures:test", batch_size=2)
image, label = (data.setup(), data.datasets["val"][3])[1]
print(data.sizes(), data.classes, tuple(image.shape), int(image.sum()), int(label))
"""


def run(code: str, folder: Path) -> str:
    if find_spec("datasets") is None:
        pytest.skip("the package datasets is not installed; pip install molflt[hub]")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    options = {"cwd": folder, "env": {**environment, "PYTHONPATH": str(ROOT)}}
    done = subprocess.run(
        [sys.executable, "-c", LOCAL + code], capture_output=True, text=True, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_texts(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "train.txt").write_text("the cat sat\non the mat\n")
    (tmp_path / "texts" / "test.txt").write_text("a cat\n")
    tokens = ["<eos>", "the", "cat", "mat", "on", "sat", "<unk>"]
    assert run(TEXT, tmp_path) == f"[8, 3] {tokens}"


def test_images(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 2, 2, 8, 8, 3), dtype=np.uint8)
    for split, images in zip(("train", "test"), pixels, strict=True):
        for name, members in zip(("cat", "dog"), images, strict=True):
            folder = tmp_path / "pictures" / split / name
            folder.mkdir(parents=True)
            for i, member in enumerate(members):
                Image.fromarray(member).save(folder / f"{i}.png")
    sizes = {"classes": 2, "channels": 3, "image_size": 8}
    expected = f"{sizes} ['cat', 'dog'] (3, 8, 8) {int(pixels[1, 1, 1].astype(int).sum())} 1"
    assert run(IMAGES, tmp_path) == expected
