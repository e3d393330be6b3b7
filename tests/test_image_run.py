"""An image classifier from idx files to accuracies and figures, on the command line."""

from __future__ import annotations

import csv
import json
import math
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_run import differences, last_state, logged, page_of, table

import molflt
from molflt.commands.cli import main
from molflt.data.images.datamodule import ImageData
from molflt.evaluation import images as evaluated
from molflt.evaluation.images import _classify, _datasets
from molflt.image import ImageClassifier
from molflt.metrics import locality
from molflt.tasks.images import ImageTask
from molflt.training.checkpoint import load_run

SMALL = [
    *("--recipe=images", "--model.dim=16", "--model.heads=2", "--model.layers=1"),
    *("--model.ffn_dim=16", "--model.num_features=8", "--model.patch_size=2"),
    *("--data.batch_size=8", "--task.warmup_steps=2", "--task.lr=1e-2"),
    "--trainer.accelerator=cpu",
    *("--trainer.log_every=10", "--trainer.val_every=20"),
]
CLASSES = ["bar", "block", "frame"]


def write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def write_images(folder: Path, name: str, count: int, seed: int) -> None:
    """Writes bars, blocks and frames of 8 x 8 pixels in noise."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 3, count)
    images = draw.integers(0, 60, (count, 8, 8))
    for image, label in zip(images, labels, strict=True):
        row, column = draw.integers(0, 4, 2)
        if label == 0:
            image[row] += 180
        else:
            image[row : row + 4, column : column + 4] += 180
        if label == 2:
            image[row + 1 : row + 3, column + 1 : column + 3] -= 180
    write_idx(folder / f"{name}-images-idx3-ubyte", images)
    write_idx(folder / f"{name}-labels-idx1-ubyte", labels)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_images(folder, "train", 240, 0)
    write_images(folder, "val", 75, 1)
    return folder


def arguments(data: Path, run: Path, *more: str) -> list[str]:
    files = [f"--data.{name}={data / name}-images-idx3-ubyte" for name in ("train", "val")]
    names = ["--data.class_names", *CLASSES]
    return ["train", *SMALL, *files, *names, f"--run={run}", *more]


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = ["--trainer.max_steps=100", "--model.position=spectral", "--task.label_smoothing=0.05"]
    words.append("--model.position_options.num_nodes=12")
    assert main(arguments(data, folder, *words)) == 0
    return folder


def test_training_learns_shapes(run: Path) -> None:
    found = logged(run, "val_top1_percent")
    assert len(found) == 5
    assert found[-1] > 80
    columns = table(run / "metrics.csv")[0].keys()
    assert {"train_top1_percent", "images_per_s", "val_cross_entropy"} < columns
    model, config = load_run(run)
    assert model.stack.position.nodes.num_nodes == 12
    assert config["model"]["classes"] == 3 and config["model"]["image_size"] == 8
    assert json.loads((run / "classes.json").read_text()) == CLASSES
    assert 0.1 < float(model.image_mean) < 0.5
    assert (run / "curve.png").stat().st_size > 1000


def test_evaluation(run: Path, tmp_path: Path) -> None:
    words = ["evaluate", str(run), "--splits", "train", "val", "--out", str(tmp_path)]
    assert main([*words, "--batch-size", "7"]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert [found["n"] for found in results.values()] == [240, 75]
    best = max(logged(run, "val_top1_percent"))
    assert results["val"]["top1_percent"] == pytest.approx(best)
    rows = [row for row in table(tmp_path / "predictions.csv") if row["split"] == "val"]
    right = [row["class"] == row["predicted"] for row in rows]
    assert len(rows) == 75
    assert 100 * np.mean(right) == pytest.approx(best)
    assert 0 < results["val"]["nearest"] < 1
    pictures = ["confusion", "attention", "encoding", *([] if all(right) else ["wrong"])]
    for name in pictures:
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
    copy = shutil.copytree(run, tmp_path / "copy")
    for path in tmp_path.glob("*.*"):
        shutil.copy(path, copy)
    page = page_of(copy)
    assert "What is missing" not in page and page.count("<img") == 1 + len(pictures)


def test_evaluation_sees_the_pixels_of_validation(data: Path, tmp_path: Path) -> None:
    """With `data.resize`, all images are resized and cut to their centers."""
    run, idx = tmp_path / "run", data / "val-images-idx3-ubyte"
    words = [*SMALL, f"--data.train={idx}", "--data.val_fraction=0.4", "--trainer.max_steps=2"]
    assert main(["train", *words, "--data.image_size=8", "--data.resize=14", f"--run={run}"]) == 0
    model, config = load_run(run)
    found = [
        _classify(model, images, 64, name).metrics | {"n": len(images)}
        for splits, other in ((["train", "val"], None), (None, idx))
        for name, images in _datasets(config["data"], ["0", "1", "2"], splits, other).items()
    ]
    train, val, whole = found
    for name in ("top1_percent", "cross_entropy"):
        assert val[name] == pytest.approx(logged(run, f"val_{name}")[-1], rel=1e-5)
        mean = sum(part["n"] * part[name] for part in (train, val)) / 75
        assert whole[name] == pytest.approx(mean, rel=1e-5)


def test_a_resumed_run_has_the_same_weights(data: Path, tmp_path: Path) -> None:
    """With random augmentation at each step."""
    words = ["--task.augment=flip_crop", "--task.schedule=inverse_sqrt"]
    words += ["--trainer.checkpoint_every=5", "--trainer.val_every=7"]
    assert main(arguments(data, tmp_path / "one", *words, "--trainer.max_steps=12")) == 0
    assert main(arguments(data, tmp_path / "two", *words, "--trainer.max_steps=7")) == 0
    assert main(["train", "--resume", str(tmp_path / "two"), "--trainer.max_steps=12"]) == 0
    one, two = (last_state(tmp_path / name)["state_dict"] for name in ("one", "two"))
    assert differences(one, two) == []


def test_sums_by_hand() -> None:
    """Ties count against the model: a constant output is never right."""
    logits = torch.randn(9, 7, dtype=torch.float64)
    labels = torch.randint(7, (9,))
    order = logits.argsort(dim=1, descending=True)
    top1 = sum(int(order[i, 0] == labels[i]) for i in range(9))
    top5 = sum(int(labels[i] in order[i, :5]) for i in range(9))
    nats = -sum(float(logits[i].log_softmax(0)[labels[i]]) for i in range(9))
    found = ImageTask.sums.of(logits, labels).metrics()
    expected = {"top1_percent": top1 / 0.09, "top5_percent": top5 / 0.09, "cross_entropy": nats / 9}
    assert found == pytest.approx(expected)
    for constant in (0.0, math.nan):
        wrong = ImageTask.sums.of(torch.full((9, 7), constant), labels)
        assert list(wrong[:2]) == [0.0, 0.0]


def test_logits_are_in_float32_under_autocast() -> None:
    """Many of 1000 logits in bfloat16 would be tied, and ties count against the model."""
    torch.manual_seed(0)
    model = ImageClassifier(1000, 1, 8, dim=16, heads=2, layers=1).eval()
    images = torch.randint(0, 256, (2, 1, 8, 8), dtype=torch.uint8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model(images)
    assert logits.dtype == torch.float32
    assert min(len(row.unique()) for row in logits) > 990


@pytest.mark.parametrize("scale", [1.0, 0.1, 0.3])
def test_patches_at_one_distance_count_equally(scale: float, monkeypatch) -> None:
    """In any unit of length; one-sided attention shows how ties are broken."""
    options = {"position": "spectral", "position_scale": scale, "num_features": 4}
    model = ImageClassifier(3, 1, 14, patch_size=1, dim=8, heads=1, layers=1, **options).eval()
    places = torch.cartesian_prod(torch.arange(14), torch.arange(14))
    apart = places[None] - places[:, None]
    weights = (-((apart[..., 1] - 3) ** 2 + apart[..., 0] ** 2) / 2.0).double().softmax(dim=1)
    monkeypatch.setattr(evaluated, "attention_of", lambda *_: [weights])
    found = evaluated._locality(model, [(torch.zeros(1, 14, 14), 0)])
    exact = locality(weights.numpy(), (apart**2).sum(-1).numpy())
    assert found == pytest.approx({"nearest": exact.nearest, "farthest": exact.farthest}, rel=1e-9)


def test_labels_are_smoothed_in_training_only() -> None:
    torch.manual_seed(0)
    net = ImageClassifier(3, 1, 8, patch_size=4, dim=8, heads=2, layers=1)
    images, labels = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8), torch.arange(4) % 3
    smooth, plain = ImageTask(net, label_smoothing=0.3), ImageTask(net)
    logs = net(images).log_softmax(dim=1)
    hit, mean = logs[torch.arange(4), labels].mean(), logs.mean()
    torch.testing.assert_close(smooth.loss((images, labels), 0.0)[0], -0.7 * hit - 0.3 * mean)
    assert smooth.judge((images, labels)) == plain.judge((images, labels))


def test_predict_reads_an_idx_file_a_folder_and_an_image(run, data, tmp_path, capsys) -> None:
    idx = data / "val-images-idx3-ubyte"
    images = ImageData(idx, idx)
    images.setup()
    pixels = torch.stack([images.datasets["val"][i][0] for i in range(70)])
    labels = molflt.load(run).classify(pixels)
    for i in (3, 60):
        gray = Image.fromarray(pixels[i, 0].numpy())
        (tmp_path / "images").mkdir(exist_ok=True)
        gray.save(tmp_path / "images" / f"{i:02d}.png")
    out = tmp_path / "labels.json"
    assert main(["predict", str(run), str(idx), "--out", str(out), "--device=cpu"]) == 0
    rows = json.loads(out.read_text())
    assert [row["label"] for row in rows[:70]] == [one.name for one in labels] and len(rows) == 75
    assert rows[3]["probability"] == pytest.approx(labels[3].probability, rel=1e-5)
    capsys.readouterr()
    for source, places in ((tmp_path / "images", (3, 60)), (tmp_path / "images/03.png", (3,))):
        assert main(["predict", str(run), str(source), "--device=cpu"]) == 0
        said = list(csv.DictReader(capsys.readouterr().out.splitlines()))
        assert [row["image"] for row in said] == [f"{i:02d}.png" for i in places]
        assert [row["label"] for row in said] == [labels[i].name for i in places]
    gray.resize((64, 64), Image.Resampling.NEAREST).save(tmp_path / "images" / "03.png")
    assert main(["predict", str(run), str(tmp_path / "images"), "--device=cpu"]) == 0


def test_loaded_runs_classify_as_the_evaluation(run: Path, data: Path, tmp_path: Path) -> None:
    images = ImageData(data / "train-images-idx3-ubyte", data / "val-images-idx3-ubyte")
    images.setup()
    val = images.datasets["val"]
    bytes_ = torch.stack([val.image(i) for i in range(len(val))])
    model = molflt.load(run)
    named = [CLASSES.index(one.name) for one in model.classify(bytes_, batch_size=7)]
    found = _classify(load_run(run)[0], val, 64, "val")
    assert named == found.predicted.tolist()
    model.save_pretrained(tmp_path / "labeler")
    for given in (bytes_.numpy(), bytes_ / 255):
        again = molflt.load(tmp_path / "labeler").classify(given)
        assert [one.name for one in again] == [CLASSES[i] for i in named]
        assert [one.probability for one in again] == pytest.approx(found.confidence, abs=1e-5)
