"""Every shipped configuration loads, says only what it must, and builds the model it describes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from molflt.data.splits import OC20_NORMALIZER
from molflt.graph.regressor import EnergyRegressor
from molflt.recipes import RECIPES
from molflt.train import build_parser

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))
ENERGIES = [path for path in FILES if path.parent.name not in ("lm", "image")]
# what has no default, for each recipe
REQUIRED = {
    "is2re": ["--data.root=somewhere"],
    "language": ["--data.train=train.txt", "--data.val=val.txt"],
    "images": ["--data.train=train", "--data.val_fraction=0.1"],
}
PAPER = sorted((CONFIGS / "oc20").glob("*.yaml"))


def resolve(*words: str) -> dict[str, Any]:
    """The complete configuration of a command line, as plain dictionaries."""
    config: dict[str, Any] = build_parser(words).parse_args(list(words)).as_dict()
    return config


def leaves(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def parameters(model: dict[str, Any]) -> int:
    return _parameters(tuple(model.items()))


@cache
def _parameters(model: tuple[tuple[str, Any], ...]) -> int:
    with torch.device("meta"):  # counted, not allocated
        return sum(p.numel() for p in EnergyRegressor(**dict(model)).parameters())


def name_of(path: Path) -> str:
    return str(path.relative_to(CONFIGS))


def test_all_combinations_are_there() -> None:
    models = ("flt-12l", "flt-10l", "performer-12l", "softmax-12l")
    expected = {f"{model}-{size}" for model in models for size in ("10k", "100k", "all")}
    assert {path.stem for path in PAPER} == expected


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_says_only_what_differs_from_the_defaults(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 40
    written = dict(leaves(yaml.safe_load(text)))
    recipe = written.pop("recipe", "is2re")
    defaults = dict(leaves(resolve("--recipe", recipe, *REQUIRED[recipe])))
    resolved = dict(leaves(resolve(*REQUIRED[recipe], "--config", str(path))))
    assert not [key for key in written if resolved[key] == defaults.get(key, "none")], "defaults"


@pytest.mark.parametrize("path", PAPER, ids=name_of)
def test_papers_settings(path: Path) -> None:
    """The numbers of FLT's section 5.3 and appendix B.3, whatever the defaults are."""
    config = resolve("--config", str(path))
    model, task, trainer = config["model"], config["task"], config["trainer"]
    kind, layers, size = path.stem.split("-")
    assert model["layers"] == int(layers.removesuffix("l"))
    assert (model["dim"], model["heads"], model["ffn_dim"]) == (768, 48, 2048)
    assert (model["num_features"], model["feature_map"]) == (64, "positive")
    assert (model["num_nodes"], model["num_gaussians"]) == (16, 32)
    assert (model["refinements"], model["periodic"], model["image_cutoff"]) == (4, "images", 8.0)
    assert (model["dropout"], model["attention_dropout"]) == (0.0, 0.1)
    assert not model["normalize_qk"] and model["position_head"]
    assert model["mixing"] == ("softmax" if kind == "softmax" else "linear")
    assert model["position"] == ("none" if kind == "performer" else "spectral")

    assert config["data"]["batch_size"] == 64
    assert config["data"]["root"].name == size
    assert (config["data"]["train_split"], config["data"]["val_split"]) == ("train", "val_id")

    assert (task["lr"], task["warmup_steps"], task["weight_decay"]) == (3e-4, 10_000, 1e-3)
    assert (tuple(task["betas"]), task["eps"]) == ((0.9, 0.98), 1e-6)
    assert (task["position_weight"], task["position_weight_final"]) == (15.0, 1.0)
    normalizer = OC20_NORMALIZER["3d-graphormer"]
    assert (task["energy_mean"], task["energy_std"]) == normalizer
    assert (trainer["max_steps"], trainer["gradient_clip"]) == (500_000, 5.0)


def test_every_recipe_has_configurations() -> None:
    named = {yaml.safe_load(path.read_text()).get("recipe", "is2re") for path in FILES}
    assert named == set(RECIPES) == set(REQUIRED)


@pytest.mark.parametrize("path", ENERGIES, ids=name_of)
def test_parameter_counts_in_the_readme(path: Path) -> None:
    """The table of configs/README.md names each file, or its prefix without the training set."""
    rows = re.findall(
        r"^\| `([^`]+)` \|.*\| ([\d,]+) \|$", (CONFIGS / "README.md").read_text(), re.M
    )
    table = {name: int(count.replace(",", "")) for name, count in rows}
    key = re.sub(r"-(10k|100k|all)\.yaml$", "-*.yaml", name_of(path))
    assert parameters(resolve("--config", str(path))["model"]) == table[key]


def test_demo_reads_the_shipped_sample() -> None:
    root = Path(resolve("--config", str(CONFIGS / "demo.yaml"))["data"]["root"])
    assert root == Path("datasets/emt-sample")


def test_what_distinguishes_the_models() -> None:
    counts = {
        path.stem.removesuffix("-all"): parameters(resolve("--config", str(path))["model"])
        for path in PAPER
        if path.stem.endswith("-all")
    }
    # A layer: attention 4 (d^2 + d), feed-forward 2 d f + d + f, two LayerNorms 4 d.
    d, f = 768, 2048
    layer = 4 * (d * d + d) + 2 * d * f + d + f + 4 * d
    assert counts["flt-12l"] - counts["flt-10l"] == 2 * layer
    # The mask: T amplitudes per head, T widths, and the nodes' sigma per head.
    assert counts["flt-12l"] - counts["performer-12l"] == 48 * 32 + 32 + 48
    assert counts["softmax-12l"] == counts["flt-12l"]
