import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from graph.test_regressor import structure
from jsonargparse import ArgumentParser
from jsonschema import Draft202012Validator
from recipe_runs import CASES
from torch_geometric.data import Batch

from molflt.attention import FEATURE_MAPS
from molflt.commands.schema import config_schema
from molflt.graph.regressor import EnergyRegressor
from molflt.training.limits import LIMITS
from molflt.training.recipes import RECIPES
from molflt.training.start import build_parser

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))
OC20 = {
    f"{kind}-{layers}l": ["base", *(["10l"] if layers == 10 else []), kind]
    for kind, layers in (("flt", 12), ("flt", 10), ("performer", 12), ("softmax", 12))
}
SIZES = [("lm", "wikitext2"), ("image", "fashion-mnist"), ("masked", "wikitext2")]
SIZES += [("proteins", "small-causal"), ("proteins", "small-masked")]
SIZES += [("translation", "multi30k"), ("pixels", "fashion-mnist")]
ENERGIES = [(p.stem,) for p in sorted(CONFIGS.glob("*.yaml")) if p.stem != "potential"]
ENERGIES += [tuple(f"oc20/{part}" for part in names) for names in OC20.values()]
ENERGIES += [("demo", f"atoms/{path.stem}") for path in sorted((CONFIGS / "atoms").glob("*.yaml"))]
TOKENS = [
    (f"{folder}/{size}", f"{folder}/{path.stem}")
    for folder, size in SIZES
    for path in sorted((CONFIGS / folder).glob("*.yaml"))
    if not {"data", "trainer"} & yaml.safe_load(path.read_text()).keys()
]
TOKENS += [("lra/listops-small", name) for size, name in TOKENS if size == "masked/wikitext2"]
TOKENS += [(f"lra/{size}", "masked/fnet") for size in ("listops", "imdb", "image")]
# required options by recipe
REQUIRED = dict.fromkeys(("is2re", "potential"), "--data.root={}")
REQUIRED |= {case.recipe: case.files for case in CASES.values()}


@cache
def parser_of(recipe: str) -> ArgumentParser:
    return build_parser(["--recipe", recipe])


def parameters(model: dict[str, Any]) -> int:
    with torch.device("meta"):  # nothing is allocated
        return sum(p.numel() for p in EnergyRegressor(**model).parameters())


@cache
def configured(*names: str) -> dict[str, Any]:
    """Returns the complete configuration of several files below configs/; only for reading."""
    words = [word for name in names for word in ("--config", str(CONFIGS / f"{name}.yaml"))]
    recipe = yaml.safe_load((CONFIGS / f"{names[0]}.yaml").read_text()).get("recipe", "is2re")
    words += [*REQUIRED[recipe].replace("{}", "folder").split(), "--recipe", recipe]
    return parser_of(recipe).parse_args(words).as_dict()


def oc20(model: str) -> dict[str, Any]:
    return configured(*(f"oc20/{name}" for name in OC20[model]))


@pytest.mark.parametrize("name", OC20)
def test_papers_settings(name: str) -> None:
    """Compares with section 5.3 and appendix B.3 of the FLT paper."""
    config = oc20(name)
    model, task, trainer = config["model"], config["task"], config["trainer"]
    kind, layers = name.split("-")
    assert model["layers"] == int(layers.removesuffix("l"))
    assert (model["dim"], model["heads"], model["ffn_dim"]) == (768, 48, 2048)
    assert (model["refinements"], model["norm"]) == (4, "pre")
    assert (model["dropout"], model["attention_dropout"]) == (0.0, 0.1)
    assert not model["normalize_qk"] and model["position_head"]
    assert model["position"] == ("none" if kind == "performer" else "spectral")
    assert (model["mixing"] == "softmax") == (kind == "softmax")
    with torch.device("meta"):
        built = EnergyRegressor(**model)
    phi = built.stack.blocks[0].attention.feature_map
    assert (phi is None) == (kind == "softmax")
    assert phi is None or (phi.width, type(phi)) == (64, FEATURE_MAPS["positive"])
    assert config["data"]["batch_size"] == 64
    assert (config["data"]["train_split"], config["data"]["val_split"]) == ("train", "val_id")
    assert (task["lr"], task["warmup_steps"], task["weight_decay"]) == (3e-4, 10_000, 1e-3)
    assert (tuple(task["betas"]), task["eps"]) == ((0.9, 0.98), 1e-6)
    assert (task["position_weight"], task["position_weight_final"]) == (15.0, 1.0)
    assert (task["energy_mean"], task["energy_std"]) == (-1.4729953244844094, 2.2707848125378405)
    assert (trainer["max_steps"], trainer["gradient_clip"]) == (500_000, 5.0)


def test_parameter_counts_in_the_readme() -> None:
    rows = re.findall(
        r"^\| `([^`]+)` \|.*\| ([\d,]+) \|$", (CONFIGS / "README.md").read_text(), re.M
    )
    table = {name: int(count.replace(",", "")) for name, count in rows}
    files = [path for path in CONFIGS.glob("*.yaml") if (path.stem,) in ENERGIES]
    own = {path.name: configured(path.stem) for path in files}
    own |= {" + ".join(f"oc20/{part}.yaml" for part in OC20[name]): oc20(name) for name in OC20}
    assert table == {name: parameters(config["model"]) for name, config in own.items()}


def shrunk(names: tuple[str, ...], **data: Any) -> tuple[Any, dict[str, Any]]:
    config = configured(*names)
    model = {**config["model"], "dim": 24, "heads": 3, "ffn_dim": 16, "layers": 2, **data}
    if "refinements" in model:
        model["refinements"] = min(2, model["refinements"])
    model |= {"dropout": 0.0, "attention_dropout": 0.0}
    return RECIPES[config["recipe"]], model


def without_gradient(model: torch.nn.Module, loss: torch.Tensor) -> list[str]:
    loss.backward()
    return [
        name
        for name, value in model.named_parameters()
        if value.requires_grad and (value.grad is None or not value.grad.isfinite().all())
    ]


@pytest.mark.parametrize("names", ENERGIES, ids=" + ".join)
def test_every_parameter_of_an_energy_configuration_learns(names: tuple[str, ...]) -> None:
    """A parameter without gradient would stop training on several devices."""
    recipe, model = shrunk(names)
    net = recipe.load("model")(**model).double()
    torch.nn.init.normal_(net.position_head.weight.weight)
    out = net(Batch.from_data_list([structure(8, 1), structure(5, 2)]))
    loss = out["energy"].sum() + out["displacement"].square().sum()
    assert without_gradient(net, loss) == []


FEW: dict[str, dict[str, Any]] = {
    "language": {"vocabulary": 40, "max_length": 24},
    "images": {"classes": 4, "channels": 1, "image_size": 28},
    "image_generation": {"channels": 3, "image_size": 3},
    "masked_language": {"vocabulary": 40, "max_length": 24, "layers": 3, "next_sentence": True},
    "translation": {"vocabulary": 40, "max_length": 24},
    "sentences": {"vocabulary": 40, "max_length": 24, "layers": 3, "classes": 10},
}


@pytest.mark.parametrize("names", TOKENS, ids=" + ".join)
def test_every_parameter_of_a_token_configuration_learns(names: tuple[str, ...]) -> None:
    kind = configured(*names)["recipe"]
    few = {"adaptive_cutoffs": [8, 20]} if names[0].startswith("lm/") else {}
    recipe, model = shrunk(names, **FEW[kind], **few)
    net = recipe.load("model")(**model)
    tokens = torch.randint(0, 40, (2, 24))
    if kind == "masked_language":
        hidden = net(tokens, tokens % 2)
        loss = net.log_likelihood(hidden, tokens).sum() + net.follows(hidden).square().sum()
    elif kind == "sentences":
        loss = net(tokens, tokens % 2).square().sum()
    elif kind == "translation":
        loss = net.log_likelihood(net(tokens, tokens), tokens)[0].sum()
    elif kind == "image_generation":
        pixels = torch.randint(256, (2, 3, 3, 3), dtype=torch.uint8)
        loss = net.image_log_likelihood(pixels).sum()
    elif kind == "language":
        loss = net.log_likelihood(tokens[:, :-1], tokens[:, 1:]).sum()
    else:
        loss = net(torch.rand(2, 1, 28, 28)).square().sum()
    assert without_gradient(net, loss) == []


# --- support of editors ---------------------------------------------------------------------------


@cache
def validator() -> Draft202012Validator:
    schema = config_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def wrong(config: dict[str, Any]) -> list[str]:
    return [error.message for error in validator().iter_errors(config)]


def test_shipped_configurations_are_valid() -> None:
    assert not [path for path in FILES if wrong(yaml.safe_load(path.read_text()))]


@pytest.mark.parametrize(
    "text",
    [
        "model: {dmi: 3}",
        "model: {dim: wide}",
        "model: {mixing: linaer}",
        "task: {betas: [0.9, high]}",
        "recipe: language\nmodel: {near_field: 5.0}",  # of another recipe
        "resume: runs/mine",
    ],
)
def test_configurations_that_training_refuses_are_invalid(text: str) -> None:
    assert wrong(yaml.safe_load(text))


def test_every_number_has_its_range() -> None:
    for one in validator().schema["$defs"].values():
        for part in ("model", "data", "task", "trainer"):
            for name, described in one["properties"][part]["properties"].items():
                types = str({k: v for k, v in described.items() if k != "description"})
                if "object" not in types and ("number" in types or "integer" in types):
                    assert f"{part}.{name}" in LIMITS or "array" in types
