import gzip
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from token_files import pixels, write_folder, write_idx
from torch import Tensor

from molflt.data.batches import held_out
from molflt.data.images import files
from molflt.data.images.augment import (
    _random_boxes,
    _random_crop,
    _random_resized_crop,
    augment,
    center_crop,
)
from molflt.data.images.datamodule import ImageData, PixelData
from molflt.data.images.files import open_images, read_alike


def test_folders_are_classes_in_order(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set")
    (root / "dog" / "deeper").mkdir()
    (root / "dog" / "3.png").rename(root / "dog" / "deeper" / "z.PNG")
    (root / "dog" / "notes.txt").write_text("no image")
    (root / "dog" / ".ipynb_checkpoints").mkdir()  # with copies of opened images
    shutil.copy(root / "dog" / "0.png", root / "dog" / ".ipynb_checkpoints" / "0-checkpoint.png")
    folder = pickle.loads(pickle.dumps(open_images(root)))  # for worker processes
    assert folder.classes == ["cat", "dog", "eel"]
    assert folder.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    image, label = folder[6]
    assert label == 1 and image.shape == (3, 8, 8)
    expected = np.random.default_rng(12).integers(0, 256, (8, 8, 3))
    assert (image.permute(1, 2, 0).numpy() == expected).all()
    flat, below = (PixelData(path, val=path) for path in (root / "cat", root))
    flat.setup()
    below.setup()
    assert len(flat.datasets["train"]) == 4
    for i in range(4):
        assert torch.equal(flat.datasets["train"][i][0], below.datasets["train"][i][0])
    (exif := Image.Exif())[0x112] = 6  # a photograph to be turned clockwise
    Image.fromarray(expected.astype(np.uint8)).save(root / "dog" / "z.png", exif=exif)
    assert torch.equal(open_images(root)[8][0], image.rot90(-1, (1, 2)))
    Image.new("RGB", (9, 8)).save(root / "dog" / "1.png")
    with pytest.raises(ValueError, match=r"dog/1.png: .*3, 8, 8.*3, 8, 9"):
        open_images(root)[5]


def test_images_in_linked_folders_are_read_once(tmp_path: Path) -> None:
    root, shared = write_folder(tmp_path / "set"), write_folder(tmp_path / "shared")
    (root / "cat" / "more").symlink_to(shared / "dog", target_is_directory=True)
    (shared / "dog" / "back").symlink_to(shared / "dog", target_is_directory=True)
    assert open_images(root).labels.bincount().tolist() == [8, 4, 4]


def test_folders_may_contain_every_format_that_is_decoded(tmp_path: Path) -> None:
    gray = pixels(1)[0]
    for ending in ("bmp", "gif", "webp", "tif"):
        Image.fromarray(gray).save(tmp_path / f"idx.{ending}", lossless=True)
    found = [*read_alike(tmp_path, 8, 3)]
    found += read_alike(tmp_path / "idx.bmp", 8, 3)  # not an idx file
    assert len(found) == 5 and all((image.numpy() == gray).all() for image in found)


def test_gray_and_transparent_images_become_colors(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set", count=1)
    gray = pixels(1)[0]
    Image.fromarray(gray).save(root / "cat" / "0.png")
    Image.fromarray(gray).convert("RGBA").save(root / "dog" / "0.png")
    for i in (0, 1):
        assert (open_images(root)[i][0].numpy() == gray).all()
    (image,) = read_alike(root / "cat", 8, 3)
    assert image.shape == (3, 8, 8) and (image.numpy() == gray).all()
    for folder in ("dog", "eel"):
        Image.fromarray(gray).save(root / folder / "0.png")
    data = PixelData(root, val=root)  # equal channels would reduce the bits per dimension
    data.setup()
    assert data.channels == 1 and (data.datasets["train"][2][0].numpy() == gray).all()
    Image.fromarray(gray.astype(np.uint16) * 256).save(root / "eel" / "0.png")
    with pytest.raises(ValueError, match="eel/0.png.* 8 bits .*I;16"):
        open_images(root)[2]


def test_color_images_in_a_gray_folder_are_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(files, "_SAMPLE", 1)  # only the first image is sampled
    root = write_folder(tmp_path / "set", count=1)
    Image.fromarray(pixels(1)[0]).save(root / "cat" / "0.png")
    data = PixelData(root, val=root)
    data.setup()
    with pytest.raises(ValueError, match=r"dog/0.png: .*\(1, 8, 8\).* \(3, 8, 8\)"):
        data.datasets["train"][1]


def test_the_shorter_side_is_resized_and_the_center_kept(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set", count=1)
    ramp = np.tile(np.arange(48, dtype=np.uint8) * 4, (24, 1))
    for name in ("cat", "dog", "eel"):
        Image.fromarray(ramp).save(root / name / "0.png")
    image = open_images(root, size=12)[0][0]
    assert image.shape == (3, 12, 12)
    middle = ramp[0, 12:36].reshape(12, 2).mean(axis=1)
    assert np.abs(image[0, 6].numpy() - middle).max() <= 1
    with pytest.raises(ValueError, match="24 x 48.*data.image_size"):
        ImageData(root, root).setup()


def test_scaled_pixels_are_means_of_areas(tmp_path: Path) -> None:
    write_folder(tmp_path, 2, 12, "x")
    whole = np.array(Image.open(tmp_path / "x" / "0.png"))
    for side in (6, 5):
        data = PixelData(tmp_path, val_fraction=0.5, image_size=side)
        data.setup()
        found = data.datasets["train"][0][0].permute(1, 2, 0).numpy()
        # Divide each pixel into side x side parts; each part lies within one new pixel.
        parts = whole.repeat(side, 0).repeat(side, 1)
        means = parts.reshape(side, 12, side, 12, 3).mean((1, 3))
        assert abs(found - means).max() <= 0.5 + 1e-4


def numbered(count: int = 64, side: int = 8) -> Tensor:
    """Returns images without black pixels, whose pixels all differ."""
    line = torch.arange(1, side * side + 1, dtype=torch.float64).view(1, 1, side, side)
    return (line + 100 * torch.arange(count).view(-1, 1, 1, 1)).expand(-1, 2, -1, -1)


def test_flips_and_crops_keep_content() -> None:
    """Random crops are shifted with a black margin; the shift is the same in all channels."""
    images = numbered(64, 10)
    once = augment(images, "flip")
    changed = (once != images).flatten(1).any(dim=1)
    assert (once[changed] == images[changed].flip(-1)).all() and 16 < int(changed.sum()) < 48
    assert (augment(images, "none", 8) == images[..., 1:9, 1:9]).all()
    assert (augment(images, "none") == images).all()
    assert (augment(images, "crop", 8) > 0).all()
    with pytest.raises(ValueError, match="at least 20 x 20"):
        augment(images, "crop", 20)
    assert (center_crop(images[0], 5) == images[0][:, 2:7, 2:7]).all()
    images = numbered()
    crops = _random_crop(images, 8, 2)
    padded = torch.nn.functional.pad(images, (2,) * 4)
    windows = padded.unfold(2, 8, 1).unfold(3, 8, 1).movedim(1, 3)
    equal = (windows == crops[:, None, None]).flatten(3).all(dim=3)
    assert (equal.sum(dim=(1, 2)) == 1).all()
    shifts = {(top, left) for _, top, left in equal.nonzero().tolist()}
    assert len(shifts) > 15 and {s[0] for s in shifts} == {s[1] for s in shifts} == set(range(5))
    assert (_random_crop(images, 8, 0) == images).all()


def test_resized_crops_of_ramps_are_exact() -> None:
    """Bilinear interpolation reproduces ramps away from the border."""
    rows = torch.linspace(0, 1, 64, dtype=torch.float64)[:, None].expand(64, 64)
    images = torch.stack((rows, rows.T)).expand(50, -1, -1, -1)
    crops = _random_resized_crop(images, 16)
    torch.manual_seed(0)
    boxes = _random_boxes(50, (64, 64)).double()
    top, left, height, width = boxes.unbind(dim=1)
    middle = (torch.arange(16) + 0.5) / 16
    for found, start, side in ((crops[:, 0, :, 3], top, height), (crops[:, 1, 5], left, width)):
        expected = (start[:, None] + side[:, None] * middle - 0.5).clamp(0, 63) / 63
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_boxes_have_the_requested_areas_and_shapes() -> None:
    boxes = _random_boxes(20_000, (60, 90))
    top, left, height, width = boxes.unbind(dim=1)
    assert (boxes >= 0).all() and (top + height <= 60).all() and (left + width <= 90).all()
    share, ratio = height * width / 5400, width / height
    assert 0.0799 < share.min() < 0.085 and 0.88 < share.max() < 8 / 9 + 1e-6  # 60 x 80
    assert 0.7499 < ratio.min() < 0.76 and 1.32 < ratio.max() < 1.3334
    small = share[share < 0.4]  # every box of this size fits, so areas are uniform
    assert abs(small.mean() - 0.24) < 0.004
    assert abs((top / (60 - height).clamp(min=1e-3))[height < 50].mean() - 0.5) < 0.01
    # Boxes that never fit are whole images
    assert (_random_boxes(5, (1, 1000)) == torch.tensor([0, 0, 1, 1000])).all()


def test_statistics_agree_with_numpy(tmp_path: Path) -> None:
    images = open_images(write_idx(tmp_path))
    mean, std = images.statistics()
    assert abs(mean.item() - (pixels() / 255).mean()) < 1e-12
    assert abs(std.item() - (pixels() / 255).std()) < 1e-12
    mean, std = open_images(write_idx(tmp_path, images=np.full((12, 8, 8), 51))).statistics()
    assert abs(mean.item() - 0.2) < 1e-12 and std.item() == 1.0


def test_batches_of_idx_files(tmp_path: Path) -> None:
    train, val = write_idx(tmp_path), write_idx(tmp_path, "t10k", pixels(6))
    for path in (val, val.with_name("t10k-labels-idx1-ubyte")):
        path.with_suffix(".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    train.write_bytes(gzip.compress(train.read_bytes()))  # without the extension
    labels = val.with_name("t10k-labels-idx1-ubyte.gz")
    labels.write_bytes(gzip.decompress(labels.read_bytes()))  # unpacked by a browser
    data = ImageData(train, val.with_suffix(".gz"), batch_size=5, class_names=["a", "b", "c"])
    assert data.sizes() == {"classes": 3, "channels": 1, "image_size": 8}
    assert json.loads(data.files()["classes.json"]) == ["a", "b", "c"]
    stream = iter(data.train_dataloader())  # batches of 5, 5 and 2 in random order
    images, labels = max((next(stream) for _ in range(3)), key=lambda batch: len(batch[1]))
    assert images.shape == (5, 1, 8, 8) and images.dtype == torch.uint8
    assert labels.shape == (5,) and labels.dtype == torch.int64
    sums = dict(zip(pixels().sum(axis=(1, 2)).tolist(), (np.arange(12) % 3).tolist(), strict=True))
    assert [sums[s] for s in images.sum(dim=(1, 2, 3)).tolist()] == labels.tolist()
    assert sum(len(batch[1]) for batch in data.val_dataloader()) == 6


def test_val_fraction_holds_out_the_last_of_each_class(tmp_path: Path) -> None:
    held = held_out(torch.tensor([0, 0, 0, 0, 1, 1, 1, 2]), 0.5, tmp_path, "images")
    assert held.nonzero()[:, 0].tolist() == [2, 3, 6]
    assert held_out(torch.zeros(100), 0.29, tmp_path, "images").sum() == 29
    data = ImageData(write_folder(tmp_path / "set"), val_fraction=0.25)
    data.setup()
    train, val = data.datasets["train"], data.datasets["val"]
    assert len(train) == 9 and val.labels.tolist() == [0, 1, 2]
    whole = open_images(tmp_path / "set")
    assert (val[1][0] == whole[7][0]).all() and (train[3][0] == whole[4][0]).all()


def test_only_training_images_keep_a_margin_for_crops(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set", side=20)
    data = ImageData(root, root, image_size=8, resize=10)
    assert data.sizes()["image_size"] == 8
    train, val = (data.datasets[use][0][0] for use in ("train", "val"))
    assert train.shape == (3, 10, 10) and (val == train[:, 1:9, 1:9]).all()
    assert torch.equal(data.for_evaluation("train")[0][0], val)
