"""Values of options: what no run can mean is told with its option, before anything is written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from sentence_files import write_sentences
from test_image_run import write_images
from test_language_run import write_text
from tiny_run import error_of, write_data, write_points
from translation_files import write_pairs

from molflt.commands import cli
from molflt.commands.limits import LIMITS
from molflt.commands.options import _options_of, parse
from molflt.commands.values import kinds_of
from molflt.training.recipes import RECIPES

# Where 0, or less, means something.
ZERO = {
    *(
        "seed",
        "data.split_seed",
        "model.near_field",
        "model.radial_basis",
        "model.messages",
        "model.dropout",
    ),
    "model.attention_dropout",
    *("model.long_range_smearing", "model.embedding_dropout", "model.floor", "data.workers"),
    *("task.position_weight", "model.attention_layers", "model.head_dropout"),
    *("task.mask_share", "task.random_share", "task.burn_in"),
    *(
        "task.position_weight_final",
        "task.energy_mean",
        "task.energy_weight",
        "task.force_weight",
        "task.stress_weight",
        "task.interpolate",
        "task.repeat",
        "task.noise",
    ),
    *("task.label_smoothing", "task.warmup_steps", "task.weight_decay", "trainer.ema_decay"),
    *("task.energy_weight", "task.force_weight", "task.stress_weight", "trainer.num_sanity"),
}
NEGATIVE = {"task.energy_mean"}


@cache
def parser_of(recipe: str) -> Any:
    return cli._parser(("train",), ["--recipe", recipe])


def typed(recipe: str, *types: type) -> Mapping[str, Any]:
    """Options, by key, that hold one of the types."""
    options = _options_of(parser_of(recipe))
    return {
        name.removeprefix("--"): action
        for name, action in options.items()
        if hasattr(action, "_typehint") and set(types) & (kinds_of(action) | numbers_in(action))
    }


def numbers_in(action: Any) -> set[Any]:
    """Types of the items of tuples and lists."""
    hints = (action._typehint, *get_args(action._typehint))
    return {part for hint in hints if get_origin(hint) in (tuple, list) for part in get_args(hint)}


def mistakes_of(recipe: str, values: Mapping[str, str]) -> str:
    words = [f"--{key}={value}" for key, value in values.items()]
    with pytest.raises(ValueError, match="mistakes") as caught:
        parse(parser_of(recipe), words)
    message = str(caught.value)
    assert message.startswith(f"{message.count('; expected ') + message.count('missing ')} mist")
    assert "\n" not in message
    return message


def told(recipe: str, values: Mapping[str, str]) -> None:
    """Asserts that each value is told with its option, in one line for all."""
    message = mistakes_of(recipe, values)
    silent = [key for key in values if f"option --{key}; expected " not in message]
    assert not silent


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", ["1" + 30 * "0", ".nan", ".inf", "many", "[]", "{a: 1}"])
def test_no_number_is_that(recipe: str, value: str) -> None:
    single = dict(typed(recipe, int, float))
    several = {key for key, action in single.items() if numbers_in(action)}
    if value == "[]":
        single = {key: action for key, action in single.items() if key not in several}
    as_item = {key: f"[{value}, {value}]" if key in several else value for key in single}
    told(recipe, as_item)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("value", "meant"), [("0", ZERO), ("-2", NEGATIVE)])
def test_zero_and_less_where_they_mean_nothing(recipe: str, value: str, meant: set[str]) -> None:
    numbers = typed(recipe, int, float)
    several = {key for key, action in numbers.items() if numbers_in(action)}
    values = {key: value for key in numbers if key not in meant | several}
    told(recipe, values | dict.fromkeys(several, f"[{value}, -2]"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_meant_passes(recipe: str) -> None:
    """The bounds of all intervals, where they are part of them."""
    required = {
        "is2re": ["data.root"],
        "potential": ["data.root"],
        "language": ["data.train", "data.val"],
        "masked_language": ["data.train", "data.val"],
        "sentences": ["data.task", "data.root"],
        "translation": ["data.train", "data.val", "data.source", "data.target"],
        "learned_optimizer": [],
        "population_optimizer": [],
    }
    words = [f"--{key}=x" for key in required.get(recipe, ["data.train"])]
    parser = parser_of(recipe)
    plain = {key for key, action in typed(recipe, int, float).items() if not numbers_in(action)}
    assert plain <= LIMITS.keys(), "give each number its range"
    for key in sorted(plain):
        interval = LIMITS[key]
        ends = interval[1:-1].split(", ")
        for bracket, end in zip((interval[0], interval[-1]), ends, strict=True):
            whole = str(int(float(end))) if int in kinds_of(typed(recipe, int, float)[key]) else end
            if bracket in "[]":
                parse(parser, [*words, f"--{key}={whole}"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_other_types(recipe: str) -> None:
    options = {
        name.removeprefix("--"): action
        for name, action in _options_of(parser_of(recipe)).items()
        if hasattr(action, "_typehint")
    }
    named = {key for key, action in options.items() if Literal in kinds_of(action)}
    choices = {key for key in named if Path not in kinds_of(options[key])}
    flags = {key for key, action in options.items() if bool in kinds_of(action)}
    nested = {key for key, action in options.items() if dict in kinds_of(action)}
    assert "model.normalize_qk" in flags or recipe == "population_optimizer"
    assert {"model.position", "task.schedule"} <= choices
    told(recipe, dict.fromkeys([*choices, *flags, *nested], "no such"))


@pytest.mark.parametrize(
    ("items", "part"),
    [
        ("{num_nodes: many}", "num_nodes; expected int or null; got 'many'"),
        ("{num_nodes: 1e30}", "num_nodes; expected int or null; got 1e+30"),
        ("{num_gaussians: 1000000000000}", "num_gaussians; expected int in [-1e6, 1e6]; got 10"),
        ("{width_range: [.nan, 1]}", "expected numbers in [-1e6, 1e6]"),
        ("{width_range: 3}", "width_range; expected tuple[float, float]; got 3"),
        ("{node_sigma: wide}", "node_sigma; expected float; got 'wide'"),
        ("{spectrum: 3}", "spectrum; expected str; got 3"),
        ("{radii: 3}", "radii; expected Tensor; got 3"),
        ("{1: 2}", "expected names of options; got 1"),
    ],
)
def test_options_of_a_position(items: str, part: str) -> None:
    for words in ([f"--model.position_options={items}", "--data.root=x"],):
        with pytest.raises(ValueError, match="model.position_options") as caught:
            parse(parser_of("is2re"), words)
        assert part in str(caught.value) and "mistakes" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "words", "part"),
    [
        (("predict",), ["a", "b", "c", "--batch_size=0"], "--batch_size; expected int in [1, 1e6]"),
        (("generate",), ["a", "--temperature=.nan"], "--temperature; expected float in (-1e15"),
        (("evaluate",), ["a", "--pictures=jpg"], "--pictures; expected some of 'svg', 'pdf' or"),
        (("generate",), ["a", f"--tokens={10**30}"], "--tokens; expected int in (-1e15"),
    ],
)
def test_other_commands(path, words, part) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        parse(cli._parser(path, words), words)
    assert part in str(caught.value)


def test_items_by_name_are_checked_beside_other_mistakes() -> None:
    words = {"model.position_options.num_nodes": "many", "model.dim": "-2"}
    message = mistakes_of("is2re", words)
    assert "(1) option --model.position_options: num_nodes; expected int or null" in message
    assert "(2) option --model.dim; expected int in [1, 65536]; got -2" in message
    assert "(3) missing --data.root" in message


@pytest.mark.parametrize("value", ["[1]", "x", "3", "null", "", "[]"])
@pytest.mark.parametrize("group", ["model", "data"])
def test_a_group_of_a_configuration_holds_keys(group, value, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(f"{group}: {value}\n")
    line = error_of(capsys, "train", "--config=c.yaml", "--data.root=x")
    assert line.startswith(f"c.yaml: key {group}; expected keys and values below it")
    line = error_of(capsys, "train", f"--{group}={value}", "--data.root=x")
    assert line.startswith(f"option --{group}; expected --{group}.NAME; got ")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (b"x", "expected a configuration, as `key: value`; got 'x'"),
        (b"", "got None"),
        (b"\xff\xfe\x00", "not a YAML configuration"),
        (2_000 * b"[", "nested too deeply"),
        (b"a: &a [*a]", "references"),
        (b"model: {dim: &a [*a]}", "references"),
        (b"resume: x", "unknown key 'resume'"),
        (b"print_config: 1", "unknown key 'print_config'"),
        (b"config: c.yaml", "unknown key 'config'"),
        (b"model: {dim: 3, hedas: 3}\ntask: {lr: .nan}", "(2) c.yaml: key task.lr; expected float"),
        (b"model: {dim: %s}" % (5000 * b"x"), "..."),
        (b"model: !!python/object/apply:os.system [touch pwned]", "not a YAML configuration"),
        (b"task: {'a: b': {}}", "unknown key 'task.a: b'"),
        (
            b"model: {dim: 8}\nseed: 1\nmodel:\n  heads: 2",
            "key 'model' in lines 1 and 3; expected it",
        ),
        (b"model:\n  dim: 8\n  'dim': 8", "key 'dim' in lines 2 and 3; expected it once; join"),
        (b"model: {dim: 2020-01-01}", "key model.dim; expected int; got datetime.date"),
    ],
)
def test_no_configuration_is_a_bug(text, part, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_bytes(text)
    line = error_of(capsys, "train", "--config=c.yaml", "--data.root=x")
    assert part in line and "c.yaml" in line and len(line) < 500
    assert os.listdir() == ["c.yaml"]


@pytest.mark.parametrize(
    ("text", "words", "part"),
    [
        ("recipe: is2ree", [], "c.yaml: key recipe 'is2ree'; expected one of is2re, potential"),
        ("seed: 1", ["--recipe=is2ree"], "error: --recipe 'is2ree'; expected one of is2re"),
        ("recipe: a", ["--recipe=b"], "error: --recipe 'b'; expected one of is2re"),
        ("recipe: potential\nmodel: {dmi: 3}", [], "see `molflt train --recipe potential --help`"),
        ("model: {dmi: 3}", [], "see `molflt train --help`"),
    ],
)
def test_a_recipe_in_messages(text, words, part, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(text)
    words = ["--config=c.yaml", "--data.root=x", *words]
    assert part in f"error: {error_of(capsys, 'train', *words)}"


def test_several_mistakes_are_all_told(capsys) -> None:
    words = ["--modle.dim", "3", "--model.heads", "x", "--task.lr", "-1", "--model", "a", "-x", "y"]
    line = error_of(capsys, "train", *words)
    assert line.startswith("6 mistakes: (1) unknown option --modle.dim; did you mean --model.dim?")
    for part in (
        "(2) unknown option -x",
        "option --model; expected --model.NAME; got 'a'",
        "option --model.heads; expected int; got 'x'",
        "option --task.lr; expected float in (0, 1000]; got -1.0",
        "(6) missing --data.root",
    ):
        assert part in line
    assert len(error_of(capsys, "train", f"--{5000 * 'x'}")) < 300


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[str]]:
    """A data set for each recipe."""
    folder = tmp_path_factory.mktemp("inputs")
    write_data(folder / "data", 3, 2)
    for name in ("train", "val"):
        write_text(folder / f"{name}.txt", 20, 0)
        write_images(folder, name, 12, 0)
    texts = [f"--data.{name}={folder}/{name}.txt" for name in ("train", "val")]
    images = [f"--data.{name}={folder}/{name}-images-idx3-ubyte" for name in ("train", "val")]
    write_points(folder / "points")
    write_sentences(folder, "SST-2", 20, 8)
    parallel = [f"--data.{name}={folder}/p{name}" for name in ("train", "val")]
    for name in ("ptrain", "pval"):
        write_pairs(folder, name, 20, 0)
    return {
        "is2re": [f"--data.root={folder}/data"],
        "potential": [f"--data.root={folder}/points"],
        "language": [*texts, "--data.length=16"],
        "images": images,
        "image_generation": images,
        "masked_language": [*texts, "--data.length=16", "--data.pieces=50"],
        "sentences": ["--data.task=SST-2", f"--data.root={folder}", "--data.pieces=50"],
        "translation": [*parallel, "--data.source=de", "--data.target=en", "--data.pieces=60"],
        "learned_optimizer": [],
        "population_optimizer": [],
    }


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--model.dim=-2"], ["option --model.dim; expected int in [1, 65536]; got -2"]),
        (["--model.dim=16", "--model.heads=3"], ["dim=16", "heads=3"]),
        (["--trainer.devices=99999"], ["--trainer.devices", "[1, 1024]"]),
        (["--trainer.devices=1000", "--trainer.accelerator=cpu"], ["trainer.devices", "core"]),
        (
            ["--trainer.precision=16-mixed", "--trainer.accelerator=cpu"],
            ["trainer.precision=16-mixed", "GPU"],
        ),
        (["--data.batch_size=0"], ["--data.batch_size", "got 0"]),
        (["--run=file"], ["file", "folder"]),
        (["--run=file/below"], ["file", "folder"]),
    ],
    ids=lambda words: " ".join(words),
)
def test_a_refused_training_leaves_nothing(
    recipe, words, parts, inputs, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    arguments = ["train", f"--recipe={recipe}", *inputs[recipe], "--run=run", *words]
    line = error_of(capsys, *arguments)
    assert all(part in line for part in parts), line
    assert os.listdir() == ["file"] and Path("file").read_text() == "mine"
    Path("run").mkdir()
    Path("run/notes.txt").write_text("mine")
    error_of(capsys, *arguments)
    assert os.listdir("run") == ["notes.txt"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(inputs, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--trainer.accelerator=gpu", "--run=run"]
    line = error_of(capsys, "train", *inputs["is2re"], *words)
    assert "trainer.accelerator=gpu; expected a GPU" in line and not os.listdir()


@pytest.mark.parametrize("key", ["recipe", "run", "init", "model: {dim", "seed"])
def test_references_in_a_configuration_are_refused(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nine lines that make 10^9 items; they would fill memory wherever a value is shown."""
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x,x]"]
    lines += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    path = tmp_path / "c.yaml"
    path.write_text("\n".join(lines) + f"\n{key}: *a8{'}' * ('{' in key)}\n")
    line = error_of(capsys, "train", f"--config={path}", f"--run={tmp_path / 'run'}")
    assert str(path) in line and "references" in line and "line 2" in line
    path.write_text("seed: &one 1\nmodel: {layers: *one}\nrecipe: language\n")
    assert "references" in error_of(capsys, "train", f"--config={path}")
