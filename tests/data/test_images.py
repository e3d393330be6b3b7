"""Images from files, their variants in training, and the batches of the data module."""

from __future__ import annotations

import gzip
import importlib
import json
import struct
import subprocess
import sys
import tracemalloc
import types
import zlib
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from molflt.data.held_out import held_out
from molflt.data.images.augment import (
    _center_crop,
    _random_boxes,
    _random_crop,
    _random_flip,
    _random_resized_crop,
    augment,
)
from molflt.data.images.datamodule import ImageData
from molflt.data.images.files import open_images
from molflt.data.images.idx import _IdxImages, _read_file
from molflt.data.images.pixels import PixelData
from molflt.data.images.unlabeled import read_alike, read_images

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "fashion_mnist"
IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def idx(array: np.ndarray[Any, Any], kind: int = 8) -> bytes:
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape)
    return head + array.astype(np.uint8).tobytes()


def pixels(count: int = 12, side: int = 8, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (count, side, side), dtype=np.uint8)


def write_idx(folder: Path, count: int = 12, side: int = 8, prefix: str = "train") -> Path:
    """A pair of idx files, labels 0, 1, 2, 0, ...; the path of the images."""
    folder.mkdir(exist_ok=True)
    path = folder / IMAGES.replace("train", prefix)
    path.write_bytes(idx(pixels(count, side)))
    (folder / LABELS.replace("train", prefix)).write_bytes(idx(np.arange(count) % 3))
    return path


def write_folder(root: Path, count: int = 4, side: int = 8, classes: str = "cat dog eel") -> Path:
    for c, name in enumerate(classes.split()):
        (root / name).mkdir(parents=True)
        for i in range(count):
            color = np.random.default_rng(10 * c + i).integers(0, 256, (side, side, 3))
            Image.fromarray(color.astype(np.uint8)).save(root / name / f"{i}.png")
    return root


def test_images_beside_folders_of_classes_are_named(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "mixed")
    (root / "stray.png").write_bytes((root / "cat" / "0.png").read_bytes())
    for data in (ImageData(root, root), PixelData(root, root)):
        with pytest.warns(UserWarning, match="1 images beside the folders .* such as 'stray.png'"):
            data.setup()
        assert len(data.datasets["train"]) == 12


@pytest.mark.parametrize("zipped", [False, True])
def test_idx_is_read_as_written(tmp_path: Path, zipped: bool) -> None:
    """Plain, gzipped, and gzipped under a name that does not say so."""
    path = tmp_path / "some-idx3"
    content = idx(pixels())
    path.write_bytes(gzip.compress(content) if zipped else content)
    assert (_read_file(path, axes=3).numpy() == pixels()).all()


def test_labels_are_found_beside_the_images(tmp_path: Path) -> None:
    path = write_idx(tmp_path)
    images = _IdxImages(path)
    assert len(images) == 12 and images.size == (8, 8) and images.classes == ["0", "1", "2"]
    image, label = images[4]
    assert image.shape == (1, 8, 8) and image.dtype == torch.uint8
    assert (image[0].numpy() == pixels()[4]).all() and label == 1 and label.dtype == torch.int64
    labels = tmp_path / LABELS
    (tmp_path / f"{LABELS}.gz").write_bytes(gzip.compress(labels.read_bytes()))
    labels.unlink()
    assert _IdxImages(path).labels.tolist() == images.labels.tolist()
    (tmp_path / f"{LABELS}.gz").rename(tmp_path / "answers.gz")
    with pytest.raises(FileNotFoundError, match=f"{LABELS}: no such file; .*data.train_labels"):
        _IdxImages(path)
    again = _IdxImages(path, labels=tmp_path / "answers.gz")
    assert again.labels.tolist() == images.labels.tolist()


HEAD = struct.pack(">BBBB3I", 0, 0, 8, 3, 12, 8, 8)
BAD_IDX = {
    "truncated": (idx(pixels())[:-1], r"expected 768 bytes .*\[12, 8, 8\]\); got 767"),
    "goes on": (idx(pixels()) + b"x", "expected 768 bytes .* got more"),
    "no header": (b"\0\0", "begins with 00 00 08; got 00 00"),
    "half a header": (HEAD[:10], "truncated, empty or mislabeled"),
    "absurd": (HEAD[:4] + b"\xff" * 20, "got 8; the file is truncated"),
    "nothing": (b"", "got nothing"),
    "empty": (idx(np.zeros((0, 8, 8))), "expected 0 bytes .* empty"),
    "png": (b"\x89PNG\r\n", "expected an idx file of bytes.* got 89 50 4e 47"),
    "floats": (idx(pixels(), kind=0x0D), "got 00 00 0d 03"),
    "labels": (idx(np.arange(12)), r"expected images \(3 axes\); got labels \(1 axis\)"),
    "colors": (idx(np.zeros((2, 3, 8, 8))), "got 4 axes; give the images file"),
    "cut gzip": (gzip.compress(idx(pixels()))[:-20], "whole gzip file; got a damaged"),
    "bad gzip": (gzip.compress(idx(pixels()))[:200] + b"junk" * 200, "whole gzip file"),
}


@pytest.mark.parametrize("case", BAD_IDX)
def test_bad_idx_files_are_named(tmp_path: Path, case: str) -> None:
    content, message = BAD_IDX[case]
    path = write_idx(tmp_path)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        _IdxImages(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.arange(11), f"{LABELS}: expected .* 12 images .*; got 11 labels"),
        (pixels(), rf"{LABELS}: expected labels \(1 axis\); got images"),
        (np.full(12, 7), "expected labels below 3, the number of classes; got 7"),
    ],
)
def test_bad_labels_are_named(tmp_path: Path, labels: Any, message: str) -> None:
    path = write_idx(tmp_path)
    (tmp_path / LABELS).write_bytes(idx(labels))
    with pytest.raises(ValueError, match=message):
        _IdxImages(path, classes=["a", "b", "c"])


def test_fashion_mnist() -> None:
    """The real files: counts, 6000 images of each class, the documented mean and deviation."""
    if not SHARED.is_dir():
        pytest.skip(f"Fashion-MNIST is not at {SHARED}")
    train, test = (SHARED / f"{use}-images-idx3-ubyte.gz" for use in ("train", "t10k"))
    data = ImageData(train, test)
    assert data.sizes() == {"classes": 10, "channels": 1, "image_size": 28}
    assert data.datasets["train"].labels.bincount().tolist() == [6000] * 10
    assert data.datasets["val"].labels.bincount().tolist() == [1000] * 10
    assert data.datasets["train"].labels[:5].tolist() == [9, 0, 0, 3, 0]
    mean, std = data.datasets["train"].statistics(most=6000)
    assert abs(mean.item() - 0.2860) < 4e-3 and abs(std.item() - 0.3530) < 4e-3


def test_folders_are_classes_in_order(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set")
    (root / "dog" / "deeper").mkdir()
    (root / "dog" / "3.png").rename(root / "dog" / "deeper" / "z.PNG")
    (root / "dog" / "notes.txt").write_text("no image")
    (root / ".cache").mkdir()
    folder = open_images(root)
    assert folder.classes == ["cat", "dog", "eel"]
    assert folder.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    image, label = folder[6]
    assert label == 1 and image.shape == (3, 8, 8)
    expected = np.random.default_rng(12).integers(0, 256, (8, 8, 3))
    assert (image.permute(1, 2, 0).numpy() == expected).all()


def test_bytes_need_no_folders_of_classes(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set", classes="cat") / "cat"
    with pytest.raises(ValueError, match="expected a folder of images for each class"):
        open_images(root)
    flat, below = (PixelData(path, path) for path in (root, root.parent))
    flat.setup()
    below.setup()
    assert len(flat.datasets["train"]) == 4
    for one, other in zip(flat.datasets["train"], below.datasets["train"], strict=True):
        assert torch.equal(one[0], other[0])
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=f"{empty}: expected images .*; got none"):
        PixelData(empty, empty).setup()


def test_grey_and_transparent_images_become_colors(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set", count=1)
    gray = pixels(1)[0]
    Image.fromarray(gray).save(root / "cat" / "0.png")
    Image.fromarray(gray).convert("RGBA").save(root / "dog" / "0.png")
    for i in (0, 1):
        assert (open_images(root)[i][0].numpy() == gray).all()
    (image,) = read_alike(root / "cat", 8, 3)  # as a model trained on them takes them
    assert image.shape == (3, 8, 8) and (image.numpy() == gray).all()
    with pytest.raises(ValueError, match="expected images of 1 channels, as in training; got 3"):
        list(read_alike(root / "dog", 8, 1))
    Image.fromarray(gray.astype(np.uint16) * 256).save(root / "eel" / "0.png")
    with pytest.raises(ValueError, match="eel/0.png: expected 8 bits per channel; got mode I;16"):
        open_images(root)[2]


def test_images_are_fitted_to_squares(tmp_path: Path) -> None:
    """The shorter side is resized and the middle kept; a ramp stays a ramp."""
    root = write_folder(tmp_path / "set", count=1)
    ramp = np.tile(np.arange(48, dtype=np.uint8) * 4, (24, 1))
    for name in ("cat", "dog", "eel"):
        Image.fromarray(ramp).save(root / name / "0.png")
    image = open_images(root, size=12)[0][0]
    assert image.shape == (3, 12, 12)
    middle = ramp[0, 12:36].reshape(12, 2).mean(axis=1)
    assert np.abs(image[0, 6].numpy() - middle).max() <= 1
    with pytest.raises(ValueError, match="square images; got 24 x 48 pixels; set data.image_size"):
        ImageData(root, root).setup()


def test_bad_folders_are_named(tmp_path: Path) -> None:
    def refuses(message: str, folder: Path, item: int = 0, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            open_images(folder, **options)[item]

    empty = tmp_path / "empty"
    empty.mkdir()
    refuses(f"{empty}: expected a folder of images for each class", empty)
    write_idx(empty)
    refuses(f"or give the file {empty / IMAGES}", empty)
    root = write_folder(tmp_path / "set")
    refuses("of the 2 classes trained on; got eel besides", root, classes=["cat", "dog"])
    (root / "fox").mkdir()
    refuses(r"set/fox: expected images \(.png, .jpg, .jpeg\); got no", root)
    (root / "fox").rmdir()
    Image.new("RGB", (9, 8)).save(root / "dog" / "2.png")
    refuses(r"dog/2.png: expected 8 x 8 pixels.* got 8 x 9; set data", root, 6)
    whole = (root / "dog" / "1.png").read_bytes()
    for content in (whole[:100], b"not an image", b""):
        (root / "dog" / "1.png").write_bytes(content)
        refuses("dog/1.png: expected an image; it cannot be decoded", root, 5)
    with pytest.raises(FileNotFoundError, match="no such file or folder; expected a folder of"):
        open_images(tmp_path / "nowhere")


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG that says it is so large, and holds nothing but further chunks."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", head), *chunks, (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in parts
    )


TEXT_BOMB = (b"zTXt", b"Comment\0\0" + zlib.compress(bytes(2**24)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (png(2**13, 2**12 + 1), "33,562,624 pixels; expected at most 33,554,432"),
        (png(2**15, 2**15), "exceeds limit"),
        (png(2**31 - 1, 2**31 - 1), "exceeds limit"),
        (png(0, 8), ""),
        (png(8, 8, TEXT_BOMB), "too large|MAX_TEXT"),
        (png(8, 8, (b"iCCP", b"x\0\0" + zlib.compress(bytes(2**24)))), ""),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n", "identify"),
        (b"BM" + b"\xff" * 60, ""),
    ],
    ids=["pixels", "bomb", "most", "none", "text", "profile", "program", "bmp"],
)
def test_bombs_are_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    """An EPS would be decoded by a program that Pillow starts."""
    path = write_folder(tmp_path / "set") / "cat" / "1.png"
    path.write_bytes(content)
    images = open_images(tmp_path / "set", size=8)
    with pytest.raises(ValueError, match=rf"1.png: expected an image; it cannot.*({message})"):
        images.image(images.files.index(str(path)))


def test_lines_are_not_blown_up(tmp_path: Path) -> None:
    """Resized to 64 pixels the shorter side, 1 x 20,000 would be 64 x 1,280,000."""
    root = write_folder(tmp_path / "set")
    Image.new("RGB", (1, 20_000)).save(root / "cat" / "1.png")
    Image.new("RGB", (1, 50)).save(root / "cat" / "2.png")
    images = open_images(root, size=64)
    narrow, wide = (images.files.index(str(root / "cat" / f"{i}.png")) for i in (1, 2))
    with pytest.raises(ValueError, match=r"1.png: expected sides within .*; got 20000 x 1 pixels"):
        images.image(narrow)
    assert images.image(wide).shape == (3, 64, 64)
    path = write_idx(tmp_path / "idx")
    path.write_bytes(idx(np.zeros((12, 1, 2000))))
    with pytest.raises(ValueError, match=f"{IMAGES}: expected sides within .*; got 1 x 2000"):
        open_images(path, size=64)


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set")
    for name in ("back", "again"):
        (root / "cat" / name).symlink_to(root / "cat", target_is_directory=True)
    (root / "cat" / "more").symlink_to(root / "dog", target_is_directory=True)
    assert len(open_images(root)) == 3 * 4 + 4


@pytest.mark.parametrize("shape", [(12, 2**15, 2**15), (2**32 - 1,) * 3, (12, 512, 512)])
@pytest.mark.parametrize("zipped", [False, True])
def test_headers_that_lie_take_no_memory(tmp_path: Path, shape: tuple[int, ...], zipped) -> None:
    path = write_idx(tmp_path)
    content = struct.pack(">BBBB3I", 0, 0, 8, 3, *shape) + bytes(12 * 64)
    path.write_bytes(gzip.compress(content) if zipped else content)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="bytes after the header, .* got 768; .* truncated"):
            _IdxImages(path)
        assert tracemalloc.get_traced_memory()[1] < 2e7
    finally:
        tracemalloc.stop()


def test_a_gzipped_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("molflt.data.packed._FREE", 2**20)
    path = write_idx(tmp_path)
    path.write_bytes(gzip.compress(struct.pack(">BBBB3I", 0, 0, 8, 3, 12, 2**10, 2**10), 1))
    with open(path, "ab") as file:
        file.write(gzip.compress(bytes(12 * 2**20)))
    with pytest.raises(ValueError, match=f"{IMAGES}: expected to unpack to at most 100 times"):
        _IdxImages(path)


def numbered(count: int = 64, side: int = 8) -> Tensor:
    """Images whose pixels all differ, none of them black."""
    line = torch.arange(1, side * side + 1, dtype=torch.float64).view(1, 1, side, side)
    return (line + 100 * torch.arange(count).view(-1, 1, 1, 1)).expand(-1, 2, -1, -1)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_flips_are_involutions() -> None:
    images = numbered()
    once = _random_flip(images, seeded())
    assert (_random_flip(once, seeded()) == images).all()
    changed = (once != images).flatten(1).any(dim=1)
    assert (once[changed] == images[changed].flip(-1)).all()
    assert 16 < int(changed.sum()) < 48


def test_crops_keep_content() -> None:
    """Each crop is a shifted copy, black outside, all shifts come, channels move together."""
    images = numbered()
    crops = _random_crop(images, 8, 2, seeded())
    padded = torch.nn.functional.pad(images, (2,) * 4)
    windows = padded.unfold(2, 8, 1).unfold(3, 8, 1).movedim(1, 3)
    equal = (windows == crops[:, None, None]).flatten(3).all(dim=3)
    assert (equal.sum(dim=(1, 2)) == 1).all()
    shifts = {(top, left) for _, top, left in equal.nonzero().tolist()}
    assert len(shifts) > 15 and {s[0] for s in shifts} == {s[1] for s in shifts} == set(range(5))
    assert (_random_crop(images, 8, 0, seeded()) == images).all()
    with pytest.raises(ValueError, match="at least 9 x 9 to crop from; got 8 x 8"):
        _random_crop(images, 9, 0)


def test_resized_crops_of_ramps_are_those_of_their_boxes() -> None:
    """Bilinear interpolation is exact on ramps, away from the border."""
    rows = torch.linspace(0, 1, 64, dtype=torch.float64)[:, None].expand(64, 64)
    images = torch.stack((rows, rows.T)).expand(50, -1, -1, -1)
    crops = _random_resized_crop(images, 16, generator=seeded())
    boxes = _random_boxes(50, (64, 64), generator=seeded()).double()
    top, left, height, width = boxes.unbind(dim=1)
    middle = (torch.arange(16) + 0.5) / 16
    for found, start, side in ((crops[:, 0, :, 3], top, height), (crops[:, 1, 5], left, width)):
        expected = (start[:, None] + side[:, None] * middle - 0.5).clamp(0, 63) / 63
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    whole = _random_resized_crop(images, 64, scale=(1, 1), ratio=(1, 1))
    torch.testing.assert_close(whole, images, rtol=1e-6, atol=1e-6)


def test_boxes_have_the_areas_and_shapes_asked_for() -> None:
    boxes = _random_boxes(20_000, (60, 90), generator=seeded())
    top, left, height, width = boxes.unbind(dim=1)
    assert (boxes >= 0).all() and (top + height <= 60).all() and (left + width <= 90).all()
    share, ratio = height * width / 5400, width / height
    assert 0.0799 < share.min() < 0.085 and 0.88 < share.max() < 8 / 9 + 1e-6  # 60 x 80
    assert 0.7499 < ratio.min() < 0.76 and 1.32 < ratio.max() < 1.3334
    small = share[share < 0.4]  # where every box fits, areas are uniform: the mean is the middle's
    assert abs(small.mean() - 0.24) < 0.004
    assert abs((top / (60 - height).clamp(min=1e-3))[height < 50].mean() - 0.5) < 0.01
    assert (_random_boxes(5, (10, 100), ratio=(0.01, 0.02)) == torch.tensor([0, 0, 10, 100])).all()


@pytest.mark.parametrize("kind", ["flip", "crop", "flip_crop", "resized_crop", "flip_resized_crop"])
def test_seeds_reproduce_variants(kind: Any) -> None:
    images = (numbered(16, 16) % 256).to(torch.uint8)
    torch.manual_seed(3)
    first = augment(images, kind)
    torch.manual_seed(3)
    assert (augment(images, kind) == first).all()
    assert not torch.equal(augment(images, kind), first)
    assert (augment(images, kind, generator=seeded(3)) == first).all()
    assert first.shape == images.shape
    assert first.is_floating_point() == ("resized" in kind)
    assert augment(images, kind, size=12).shape == (16, 2, 12, 12) or kind == "flip"
    if "resized" in kind:
        assert first.min() >= 0 and first.max() <= 1


def test_larger_images_are_cut() -> None:
    images = numbered(8, 10)
    assert (augment(images, "none", 8) == images[..., 1:9, 1:9]).all()
    assert augment(images, "none") is not None and (augment(images, "none") == images).all()
    crops = augment(images, "crop", 8, seeded())
    assert (crops > 0).all(), "no black margin where there is more image"
    assert (_center_crop(images[0], 5) == images[0][:, 2:7, 2:7]).all()
    with pytest.raises(ValueError, match="at least 12 x 12; got 10 x 10"):
        augment(images, "flip", 12)
    with pytest.raises(ValueError, match="augment='turn' is unknown; expected one of none, flip"):
        augment(images, "turn")  # type: ignore[arg-type]


def test_statistics_of_a_large_image_take_little_memory(tmp_path: Path) -> None:
    """A GIF of several frames with the name of a PNG: int64 bins would take 24 bytes a byte."""
    frames = [Image.fromarray(np.full((1500, 1500), shade, np.uint8)) for shade in (90, 200, 30)]
    (tmp_path / "x").mkdir()
    frames[0].save(tmp_path / "x/1.png", format="GIF", save_all=True, append_images=frames[1:])
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from molflt.data.images.files import open_images\n"
        "images = open_images(Path(sys.argv[1]))\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "images.image(0); before = peak(); mean = images.statistics()[0]\n"
        "print(float(mean[0]), peak() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True
    )
    mean, more = map(float, done.stdout.split())
    assert mean == pytest.approx(90 / 255) and more < 40_000  # kB; 6.75 MB of bytes


def test_statistics_are_those_of_numpy(tmp_path: Path) -> None:
    images = _IdxImages(write_idx(tmp_path))
    mean, std = images.statistics()
    assert abs(mean.item() - (pixels() / 255).mean()) < 1e-12
    assert abs(std.item() - (pixels() / 255).std()) < 1e-12
    few = images.statistics(most=3)[0]
    assert abs(few.item() - (pixels()[[0, 4, 8]] / 255).mean()) < 1e-12
    (tmp_path / IMAGES).write_bytes(idx(np.full((12, 8, 8), 51)))
    mean, std = _IdxImages(tmp_path / IMAGES).statistics()
    assert abs(mean.item() - 0.2) < 1e-12 and std.item() == 1.0


def test_idx_files_in_batches(tmp_path: Path) -> None:
    pair = write_idx(tmp_path), write_idx(tmp_path, 6, prefix="t10k")
    data = ImageData(*pair, batch_size=5, class_names=["a", "b", "c"])
    assert data.sizes() == {"classes": 3, "channels": 1, "image_size": 8}
    assert json.loads(data.files()["classes.json"]) == ["a", "b", "c"]
    assert data.describe() == [
        f"train 12 images ({IMAGES})",
        "val 6 images (t10k-images-idx3-ubyte)",
    ]
    stream = iter(data.train_dataloader())  # batches of 5, 5 and 2 in random order
    images, labels = max((next(stream) for _ in range(3)), key=lambda batch: len(batch[1]))
    assert images.shape == (5, 1, 8, 8) and images.dtype == torch.uint8
    assert labels.shape == (5,) and labels.dtype == torch.int64
    sums = dict(zip(pixels().sum(axis=(1, 2)).tolist(), (np.arange(12) % 3).tolist(), strict=True))
    assert [sums[s] for s in images.sum(dim=(1, 2, 3)).tolist()] == labels.tolist()
    assert sum(len(batch[1]) for batch in data.val_dataloader()) == 6
    before = data.datasets["train"]
    data.setup()
    assert data.datasets["train"] is before


def test_val_fraction_holds_out_the_last_of_each_class(tmp_path: Path) -> None:
    held = held_out(torch.tensor([0, 0, 0, 0, 1, 1, 1, 2]), 0.5, tmp_path, "images")
    assert held.nonzero()[:, 0].tolist() == [2, 3, 6]
    data = ImageData(write_folder(tmp_path / "set"), val_fraction=0.25)
    data.setup()
    train, val = data.datasets["train"], data.datasets["val"]
    assert len(train) == 9 and val.labels.tolist() == [0, 1, 2]
    whole = open_images(tmp_path / "set")
    assert (val[1][0] == whole[7][0]).all() and (train[3][0] == whole[4][0]).all()
    with pytest.raises(ValueError, match=r"val_fraction=0.01 of 12 images leaves none"):
        ImageData(tmp_path / "set", val_fraction=0.01).setup()


def test_jpegs_to_be_labeled_are_read_as_in_training(tmp_path: Path) -> None:
    """Large ones in part, by the same transform: to the byte."""
    (tmp_path / "cat").mkdir()
    noise = Image.fromarray(np.stack([pixels(1, 40, seed)[0] for seed in range(3)], axis=-1))
    noise.resize((640, 480)).save(tmp_path / "cat" / "0.jpg", quality=92)
    ((name, image),) = read_images(tmp_path, 32, 3)
    assert name == "cat/0.jpg" and torch.equal(image, open_images(tmp_path, size=32).image(0))


def test_resize_leaves_room_for_crops(tmp_path: Path) -> None:
    """Training images keep the margin; validation images are their centers."""
    root = write_folder(tmp_path / "set", side=20)
    data = ImageData(root, root, image_size=8, resize=10)
    assert data.sizes()["image_size"] == 8
    train, val = (data.datasets[use][0][0] for use in ("train", "val"))
    assert train.shape == (3, 10, 10) and (val == train[:, 1:9, 1:9]).all()
    mean, _ = data.statistics()
    assert mean.shape == (3,)


def test_data_that_do_not_go_together(tmp_path: Path) -> None:
    path = write_idx(tmp_path / "a")
    root = write_folder(tmp_path / "set")
    for options, message in (
        ({}, "either data.val or data.val_fraction; got neither"),
        ({"val": path, "val_fraction": 0.1}, "got both"),
        (
            {"val_fraction": 0.1, "val_labels": path},
            "data.val_labels has no effect with data.val_fraction=0.1, which takes images of",
        ),
        ({"val_fraction": 1.0}, "must be between 0 and 1; got 1.0"),
        ({"val": path, "image_size": 0}, "image_size must be at least 1; got 0"),
        ({"val": path, "resize": 9}, "data.resize must be at least data.image_size=None"),
        ({"val": path, "image_size": 9, "resize": 8}, "at least data.image_size=9; got 8"),
        ({"val": path, "batch_size": 0}, "batch_size must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            ImageData(path, **options)
    with pytest.raises(ValueError, match="expected val images of 8 pixels and 1 channels"):
        ImageData(path, write_idx(tmp_path / "b", side=9)).setup()
    with pytest.raises(ValueError, match="and 1 channels, as in training; got 8 and 3"):
        ImageData(path, root, class_names=["cat", "dog", "eel"]).setup()
    for options in ({"train_labels": path}, {"val_labels": path}):
        with pytest.raises(ValueError, match="a file of labels has no effect with .*set, whose"):
            ImageData(root, root, **options).setup()


class Rows:
    """What `load_dataset` returns, as far as it is used."""

    features: ClassVar = {"img": None, "label": types.SimpleNamespace(names=["x", "y"])}

    def __getitem__(self, key: int | str) -> Any:
        return [0, 1, 1] if key == "label" else {"img": Image.fromarray(pixels(3)[int(key)])}


def test_hugging_face_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    fake = types.ModuleType("datasets")
    fake.__spec__ = importlib.machinery.ModuleSpec("datasets", None)
    fake.load_dataset = lambda name, split: asked.append((name, split)) or Rows()
    monkeypatch.setitem(sys.modules, "datasets", fake)
    data = ImageData(Path("hf:some/set"), Path("hf:some/set:test"))
    assert data.sizes() == {"classes": 2, "channels": 3, "image_size": 8}
    assert asked == [("some/set", "train"), ("some/set", "test")]
    image, label = data.datasets["val"][2]
    assert (image.numpy() == pixels(3)[2]).all() and label == 1
    hidden = {"__getitem__": lambda self, key: [-1, -1, 1] if key == "label" else None}
    fake.load_dataset = lambda name, split: type("Hidden", (Rows,), hidden)()
    with pytest.raises(ValueError, match="^hf:a/b:test: .* got label -1 in 2 of 3 rows, as where"):
        open_images(Path("hf:a/b:test"))
