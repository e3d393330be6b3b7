"""Images pixel by pixel on the command line: training, bits per dimension, generation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data.test_images import idx
from PIL import Image
from tiny_run import error_of, logged

import molflt
from molflt.commands.cli import main
from molflt.commands.generate import _draw
from molflt.data.images.datamodule import PixelData
from molflt.data.images.unlabeled import write_sheet
from molflt.evaluation.images import _around
from molflt.pretrained import ImageWriter

SMALL = [
    *("--recipe=image_generation", "--model.dim=16", "--model.heads=2", "--model.layers=1"),
    *("--model.ffn_dim=16", "--model.num_features=8", "--data.batch_size=8", "--task.lr=2e-2"),
    *("--task.warmup_steps=2", "--trainer.accelerator=cpu", "--trainer.log_every=10"),
    *("--trainer.max_steps=60", "--trainer.val_every=60", "--model.position=spectral"),
    *("--model.position_options.dim=3", "--model.position_options.num_nodes=4"),
]
SIDE = 4


def write_stripes(folder: Path, name: str, count: int, seed: int) -> Path:
    """Writes images of 8 x 8 whose dark and light rows follow from the first one."""
    draw = np.random.default_rng(seed)
    first = draw.integers(0, 2, (count, 1, 1))
    rows = (first + np.arange(8)[:, None] // 2) % 2
    images = np.broadcast_to(40 + 160 * rows, (count, 8, 8))
    (folder / f"{name}-labels-idx1-ubyte").write_bytes(idx(first[:, 0, 0]))
    path = folder / f"{name}-images-idx3-ubyte"
    path.write_bytes(idx(images))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pixels")
    files = {name: write_stripes(folder, name, n, n) for name, n in (("train", 40), ("val", 12))}
    words = [f"--data.{name}={path}" for name, path in files.items()]
    run = folder / "run"
    assert main(["train", *SMALL, *words, f"--data.image_size={SIDE}", f"--run={run}"]) == 0
    return run


def test_bits_per_dim_of_model_and_histogram(run: Path) -> None:
    assert main(["evaluate", str(run), "--splits", "train", "val", "--batch-size", "5"]) == 0
    found = json.loads((run / "results.json").read_text())
    data = PixelData(
        *(run.parent / f"{n}-images-idx3-ubyte" for n in ("train", "val")), image_size=4
    )
    data.setup()
    sets = {name: torch.stack([image for image, _ in data.datasets[name]]) for name in found}
    model = molflt.load(run).model
    for name, images in sets.items():
        bits = -model.image_log_likelihood(images).double().mean().item() / math.log(2)
        assert found[name]["bits_per_dim"] == pytest.approx(bits, rel=1e-5)
        assert found[name]["uniform_bits_per_dim"] == 8
        assert (found[name]["n"], found[name]["bytes"]) == (len(images), 16 * len(images))
        seen = sets["train"].flatten(1)
        count = (seen[None] == images.flatten(1)[:, None]).sum(dim=1).double()
        histogram = -((count + 1) / (len(seen) + 256)).log2().mean().item()
        assert found[name]["histogram_bits_per_dim"] == pytest.approx(histogram, rel=1e-9)
    assert found["val"]["bits_per_dim"] == pytest.approx(logged(run, "val_bits_per_dim")[-1])
    assert found["val"]["bits_per_dim"] < 0.5 * found["val"]["histogram_bits_per_dim"]
    for name in ("losses", "attention", "encoding"):
        assert (run / f"{name}.png").stat().st_size > 1000
    (run.parent / "train-images-idx3-ubyte").rename(run.parent / "away")
    other = run.parent / "val-images-idx3-ubyte"
    assert main(["evaluate", str(run), "--data", str(other), "--out", str(run.parent / "o")]) == 0
    (run.parent / "away").rename(run.parent / "train-images-idx3-ubyte")
    again = json.loads((run.parent / "o" / "results.json").read_text())[other.name]
    assert again["bits_per_dim"] == pytest.approx(found["val"]["bits_per_dim"])
    assert again["histogram_bits_per_dim"] is None


def test_attention_around_a_pixel_is_a_mean_over_existing_neighbors() -> None:
    side, channels = 3, 2
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(2, 18, 18, generator=generator, dtype=torch.float64).tril()
    model = molflt.sequence.PixelModel(channels, side, dim=8, heads=2, layers=1)
    found = _around(weights, model)
    assert found.shape == (2, side, 2 * side - 1)
    for up in range(side):
        for right in range(1 - side, side):
            own = []
            for i in range(18):
                row, column = i // channels // side - up, i // channels % side + right
                if row >= 0 and 0 <= column < side:
                    # Key j has seen byte j - 1
                    keys = [(row * side + column) * channels + c + 1 for c in range(channels)]
                    own.append(sum(weights[:, i, j] for j in keys if j < 18))
            torch.testing.assert_close(
                found[:, side - 1 - up, side - 1 + right], sum(own) / len(own)
            )


def test_images_are_generated_and_completed(run: Path) -> None:
    words = ["generate", str(run), "--images", "5", "--seed", "3", "--temperature", "0.5"]
    assert main(words) == 0
    first = (run / "samples.png").read_bytes()
    assert main(words) == 0
    assert (run / "samples.png").read_bytes() == first
    assert main([*words[:-4], "--seed", "4"]) == 0
    assert (run / "samples.png").read_bytes() != first
    val, first = run.parent / "val-images-idx3-ubyte", (run / "samples.png").read_bytes()
    words = ["generate", str(run), "--file", str(val), "--fit", "--rows", "1", "--temperature", "0"]
    assert main(words) == 0
    assert (run / "samples.png").read_bytes() == first
    sheet = np.array(Image.open(run / "completions.png"))
    assert sheet.shape == (3 * (56 + 2) + 2, 8 * (56 + 2) + 2)
    given, drawn, original = (sheet[2 + 58 * i : 58 + 58 * i, 2:58] for i in range(3))
    assert (given[:14] == original[:14]).all() and (given[14:] == 128).all()
    assert (drawn[:14] == original[:14]).all()
    assert (drawn == original).mean() > 0.9  # the first row determines the others


def test_a_loaded_model_and_an_export(run: Path, tmp_path: Path) -> None:
    model = molflt.load(run)
    assert isinstance(model, ImageWriter)
    images = model.generate(3, seed=1)
    assert images.shape == (3, 1, SIDE, SIDE) and images.dtype == torch.uint8
    below = model.generate(given=images, rows=2, seed=2)
    assert torch.equal(below[:, :, :2], images[:, :, :2])
    assert main(["export", str(run), str(tmp_path / "out"), "--about=stripes"]) == 0
    assert torch.equal(molflt.load(tmp_path / "out").generate(3, seed=1), images)
    for options, words in (
        ({"rows": 2}, "rows=2"),
        ({"count": 2, "given": images}, "count=2"),
        ({"count": 0}, "count"),
        ({"given": images[..., :3]}, r"\(batch, 1, 4, 4\)"),
    ):
        with pytest.raises(ValueError, match=words):
            model.generate(**options)


def test_requests_that_cannot_be_drawn(run: Path, tmp_path: Path, capsys) -> None:
    val = str(run.parent / "val-images-idx3-ubyte")
    for words, message in (
        (["--file", val], "8 x 8"),
        (["--file", val, "--fit", "--rows", "4"], "1 to 3"),
        (["--rows", "2"], "--rows 2"),
        (["--prompt", "a"], "--prompt a"),
        (["--out", "a.jpg"], ".png"),
    ):
        assert message in error_of(capsys, "generate", str(run), *words)
    assert "images" in error_of(capsys, "predict", str(run), val)


@pytest.mark.parametrize("whole", [True, False])
def test_outputs_are_checked_before_anything_is_drawn(tmp_path: Path, whole) -> None:
    """A given image is never overwritten, named by itself or in its folder."""
    writer = SimpleNamespace(  # drawing would be an AttributeError
        model=SimpleNamespace(image_size=SIDE, channels=1, decodes=True),
        trained=SimpleNamespace(path=tmp_path),
        name="run",
    )
    photo = tmp_path / "photos" / "photo.png"
    photo.parent.mkdir()
    Image.new("L", (SIDE, SIDE)).save(photo)
    before = photo.read_bytes()
    with pytest.raises(ValueError, match="photo.png"):
        _draw(writer, photo.parent if whole else photo, None, None, False, photo, {})
    with pytest.raises(OSError, match="x.png"):
        _draw(writer, photo if whole else None, None, None, False, photo / "x.png", {})
    assert photo.read_bytes() == before


def test_scaled_pixels_are_means_of_areas(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    for ending in ("png", "jpg"):
        file = tmp_path / ending / "x" / f"1.{ending}"
        file.parent.mkdir(parents=True)
        Image.fromarray(pixels).save(file)
        Image.fromarray(pixels).save(file.with_stem("2"))
        whole = Image.open(file).convert("RGB")
        for side in (6, 5):
            data = PixelData(tmp_path / ending, val_fraction=0.5, image_size=side)
            data.setup()
            found = data.datasets["train"][0][0].permute(1, 2, 0).numpy()
            # Divide pixels into side x side parts, which new pixels contain completely
            parts = np.array(whole).repeat(side, 0).repeat(side, 1)
            means = parts.reshape(side, 12, side, 12, 3).mean((1, 3))
            assert abs(found - means).max() <= 0.5 + 1e-4
            if side == 6:
                assert abs(found - np.array(whole.reduce(2)).astype(int)).max() <= 1  # Pillow's


def test_many_images_are_divided_into_strips(tmp_path: Path) -> None:
    images = torch.arange(20, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 60, 60)
    write_sheet(tmp_path / "a.png", [images, images])
    sheet = np.array(Image.open(tmp_path / "a.png"))
    assert sheet.shape == (4 * 62 + 2, 16 * 62 + 2, 3)
    assert sheet[2 + 62 * 2, 2, 0] == 16 and sheet[2 + 62 * 3, 2 + 62 * 3, 0] == 19
