"""Tests with the package `datasets` on local folders, which `dataset_loader` would refuse."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_run import python

CODE = """
import molflt.data.text.sources as texts, molflt.data.images.files as images, datasets
from molflt.data.images.datamodule import ImageData
from molflt.data.text.datamodule import TextData
texts.dataset_loader = images.dataset_loader = lambda source: datasets.load_dataset
data = TextData("hf:texts:train.text", "hf:texts:test", length=4, batch_size=1)
data.setup()
print([blocks.tokens for blocks in data.datasets.values()], data.vocabulary.tokens)
data = ImageData("hf:pictures:train", "hf:pictures:test", batch_size=2)
image, label = (data.setup(), data.datasets["val"][3])[1]
print(data.sizes(), data.classes, tuple(image.shape), int(image.sum()), int(label))
"""


@pytest.mark.skipif(find_spec("datasets") is None, reason="requires pip install molflt[hub]")
def test_texts_and_images(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "train.txt").write_text("the cat sat\non the mat\n")
    (tmp_path / "texts" / "test.txt").write_text("a cat\n")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 2, 2, 8, 8, 3), dtype=np.uint8)
    for split, images in zip(("train", "test"), pixels, strict=True):
        for name, members in zip(("cat", "dog"), images, strict=True):
            folder = tmp_path / "pictures" / split / name
            folder.mkdir(parents=True)
            for i, member in enumerate(members):
                Image.fromarray(member).save(folder / f"{i}.png")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    path = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = python("-c", CODE, cwd=tmp_path, **offline, **path)
    tokens = ["<eos>", "the", "cat", "mat", "on", "sat", "<unk>"]
    sizes = {"classes": 2, "channels": 3, "image_size": 8}
    sum_of_one = int(pixels[1, 1, 1].astype(int).sum())
    assert done.stdout.strip().splitlines()[-2:] == [
        f"[8, 3] {tokens}",
        f"{sizes} ['cat', 'dog'] (3, 8, 8) {sum_of_one} 1",
    ]
