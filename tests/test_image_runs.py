import csv
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from recipe_runs import SHAPES, SIDE, data_of, trained, words_of
from tiny_run import logged, page_of, printed, results_of, table
from token_files import write_folder
from torch.utils.data import DataLoader

import molflt
from molflt.commands.cli import main
from molflt.data.images.datamodule import ImageData, PixelData
from molflt.evaluation import images as evaluation
from molflt.evaluation.common import logits_of, named_images
from molflt.image import ImageClassifier
from molflt.metrics import locality
from molflt.tasks.images import ImageTask
from molflt.training.checkpoint import load_run

IMAGES = "{}-images-idx3-ubyte"

# --- classifiers --------------------------------------------------------------------------------


def test_evaluation_of_classes(tmp_path: Path) -> None:
    run, out = trained("images"), tmp_path / "run"
    model, config = load_run(run)
    assert config["model"]["classes"] == 3 and config["model"]["image_size"] == 8
    assert json.loads((run / "classes.json").read_text()) == SHAPES
    assert 0.1 < float(model.image_mean) < 0.5
    shutil.copytree(run, out)
    results = results_of(out, "--splits", "train", "val", "--batch-size", "7")
    assert [found["n"] for found in results.values()] == [240, 75]
    rows = [row for row in table(out / "predictions.csv") if row["split"] == "val"]
    right = [row["class"] == row["predicted"] for row in rows]
    assert len(rows) == 75
    assert 100 * np.mean(right) == pytest.approx(max(logged(run, "val_top1_percent")))
    assert 0 < results["val"]["nearest"] < 1
    assert page_of(out).count("<img") == 3  # curve, attention, encoding


def test_evaluation_sees_the_pixels_of_validation(tmp_path: Path) -> None:
    """With `data.resize`, all images are resized and cropped at the center."""
    run, idx = tmp_path / "run", data_of("images") / IMAGES.format("val")
    words = [word for word in words_of("images", run) if not word.startswith("--data.val=")]
    words += [f"--data.train={idx}", "--data.val_fraction=0.4", "--trainer.max_steps=2"]
    assert main([*words, "--data.image_size=8", "--data.resize=14", "--trainer.val_every=2"]) == 0
    model, config = load_run(run)
    found = [
        ImageTask.sums.of(*logits_of(model, DataLoader(images, 64), name, "")).metrics()
        | {"n": len(images)}
        for splits, other in ((["train", "val"], None), (None, idx))
        for name, images in named_images(ImageData, config["data"], splits, other)[1].items()
    ]
    train, val, whole = found
    for name in ("top1_percent", "cross_entropy"):
        assert val[name] == pytest.approx(logged(run, f"val_{name}")[-1], rel=1e-5)
        mean = sum(part["n"] * part[name] for part in (train, val)) / 75
        assert whole[name] == pytest.approx(mean, rel=1e-5)
    images = named_images(ImageData, config["data"], data=idx)[1][idx.name]
    logits, _ = logits_of(model, DataLoader(images, 64), "", "")
    molflt.load(run).save_pretrained(tmp_path / "labeler")
    for source in (run, tmp_path / "labeler"):
        out = tmp_path / "labels.json"
        assert main(["predict", str(source), str(idx), "--out", str(out), "--device=cpu"]) == 0
        shares = [row["probability"] for row in json.loads(out.read_text())]
        assert shares == pytest.approx(logits.softmax(dim=1).amax(dim=1).tolist(), rel=1e-5)


def test_other_images_may_lack_classes_but_not_add_any(tmp_path: Path) -> None:
    root, some = write_folder(tmp_path / "all"), write_folder(tmp_path / "some", classes="dog eel")
    (tmp_path / "classes.json").write_text('["cat", "dog", "eel"]')
    model = ImageClassifier(3, 3, 8, patch_size=4, dim=8, heads=2, layers=1).eval()
    given = tmp_path, model, {"data": {"train": root, "val": root}}, tmp_path
    assert evaluation.evaluate(*given, data=some).results["some"]["n"] == 8
    assert [row["class"] for row in table(tmp_path / "predictions.csv")] == ["dog"] * 4 + [
        "eel"
    ] * 4
    write_folder(some, classes="fox")
    with pytest.raises(ValueError, match="fox"):
        evaluation.evaluate(*given, data=some)


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
    model = ImageClassifier(1000, 1, 8, dim=16, heads=2, layers=1).eval()
    images = torch.randint(0, 256, (2, 1, 8, 8), dtype=torch.uint8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model(images)
    assert logits.dtype == torch.float32
    assert min(len(row.unique()) for row in logits) > 990


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_patches_at_one_distance_count_equally(scale: float, monkeypatch) -> None:
    """Includes other units of length; one-sided attention reveals how ties are broken."""
    options = {"position": "spectral", "position_scale": scale, "num_features": 4}
    model = ImageClassifier(3, 1, 14, patch_size=1, dim=8, heads=1, layers=1, **options).eval()
    places = torch.cartesian_prod(torch.arange(14), torch.arange(14))
    apart = places[None] - places[:, None]
    weights = (-((apart[..., 1] - 3) ** 2 + apart[..., 0] ** 2) / 2.0).double().softmax(dim=1)
    monkeypatch.setattr(evaluation.common, "attention_of", lambda *_: [weights])
    found = evaluation._locality(model, [(torch.zeros(1, 14, 14), 0)])
    exact = locality(weights.numpy(), (apart**2).sum(-1).numpy())
    assert found == pytest.approx({"nearest": exact.nearest, "farthest": exact.farthest}, rel=1e-9)


def test_labels_are_smoothed_in_training_only() -> None:
    net = ImageClassifier(3, 1, 8, patch_size=4, dim=8, heads=2, layers=1)
    images, labels = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8), torch.arange(4) % 3
    smooth, plain = ImageTask(net, label_smoothing=0.3), ImageTask(net)
    logs = net(images).log_softmax(dim=1)
    hit, mean = logs[torch.arange(4), labels].mean(), logs.mean()
    torch.testing.assert_close(smooth.loss((images, labels), 0.0)[0], -0.7 * hit - 0.3 * mean)
    assert smooth.validation_sums((images, labels)) == plain.validation_sums((images, labels))


def test_all_ways_to_classify_agree(tmp_path: Path, capsys) -> None:
    run, idx = trained("images"), data_of("images") / IMAGES.format("val")
    images = ImageData(idx, idx)
    images.setup()
    val = images.datasets["val"]
    pixels = torch.stack([val[i][0] for i in range(len(val))])
    logits, _ = logits_of(load_run(run)[0], DataLoader(val, 64), "val", "")
    confidence, found = logits.softmax(dim=1).max(dim=1)
    model = molflt.load(run)
    labels = model.classify(pixels, batch_size=7)
    assert [SHAPES.index(one.name) for one in labels] == found.tolist()
    model.save_pretrained(tmp_path / "labeler")
    for given in (pixels.numpy(), pixels / 255):
        again = molflt.load(tmp_path / "labeler").classify(given)
        assert [one.name for one in again] == [one.name for one in labels]
        assert [one.probability for one in again] == pytest.approx(confidence.tolist(), abs=1e-5)
    (tmp_path / "images").mkdir()
    for i in (3, 60):
        Image.fromarray(pixels[i, 0].numpy()).save(tmp_path / "images" / f"{i:02d}.png")
    for source, places in ((tmp_path / "images", (3, 60)), (tmp_path / "images/03.png", (3,))):
        said = printed(capsys, "predict", run, source, "--device=cpu").out
        said = list(csv.DictReader(said.splitlines()))
        assert [row["image"] for row in said] == [f"{i:02d}.png" for i in places]
        assert [row["label"] for row in said] == [labels[i].name for i in places]


# --- models of pixels ---------------------------------------------------------------------------


def test_bits_per_dim_of_model_and_histogram(tmp_path: Path) -> None:
    run, files = trained("image_generation"), data_of("image_generation")
    words = ("--splits", "train", "val", "--batch-size", "5")
    found = results_of(run, *words, out=tmp_path)
    train, val = (files / IMAGES.format(name) for name in ("train", "val"))
    data = PixelData(train, val=val, image_size=SIDE)
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
    assert found["val"]["bits_per_dim"] < 0.5 * found["val"]["histogram_bits_per_dim"]
    for name in ("losses", "attention", "encoding"):
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
    away = train.rename(files / "away")
    try:
        again = results_of(run, "--data", val, out=tmp_path)[val.name]
    finally:
        away.rename(train)
    assert again["bits_per_dim"] == pytest.approx(found["val"]["bits_per_dim"])
    assert again["histogram_bits_per_dim"] is None


def test_images_are_generated_and_completed(tmp_path: Path) -> None:
    run, out = str(trained("image_generation")), tmp_path / "samples.png"
    drawn = []
    for seed in (3, 3, 4):
        words = ["--images", "5", "--seed", str(seed), "--temperature", "0.5", f"--out={out}"]
        assert main(["generate", run, *words]) == 0
        drawn.append(out.read_bytes())
    assert drawn[0] == drawn[1] != drawn[2]
    val = data_of("image_generation") / IMAGES.format("val")
    words = ["--file", str(val), "--fit", "--rows", "1", "--temperature", "0", f"--out={out}"]
    assert main(["generate", run, *words]) == 0
    sheet = np.array(Image.open(out))
    assert sheet.shape == (3 * (56 + 2) + 2, 8 * (56 + 2) + 2)
    given, completed, original = (sheet[2 + 58 * i : 58 + 58 * i, 2:58] for i in range(3))
    assert (given[:14] == original[:14]).all() and (given[14:] == 128).all()
    assert (completed[:14] == original[:14]).all()
    assert (completed == original).mean() > 0.9  # the first row determines all other rows
    model = molflt.load(run)
    images = model.generate(3, seed=1)
    assert images.shape == (3, 1, SIDE, SIDE) and images.dtype == torch.uint8
    below = model.generate(given=images, rows=2, seed=2)
    assert torch.equal(below[:, :, :2], images[:, :, :2])
    assert main(["export", run, str(tmp_path / "out"), "--about=stripes"]) == 0
    assert torch.equal(molflt.load(tmp_path / "out").generate(3, seed=1), images)
