"""Shipped configurations, and paths in configurations."""

from __future__ import annotations

from pathlib import Path

import yaml
from tiny_run import SMALL, write_data

from molflt import shipped
from molflt.commands.cli import main
from molflt.commands.train import build_parser
from molflt.shipped import config_names, find_config

ROOT = Path(__file__).resolve().parents[1]
STEPS = ("--trainer.max_steps=2", "--task.warmup_steps=1")


def parsed(*words: str):
    return build_parser(words).parse_args(list(words))


def test_every_configuration_has_a_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert {"demo", "atoms/flt", "oc20/base"} <= set(config_names())
    for name in config_names():
        assert find_config(name) == ROOT / "configs" / f"{name}.yaml"
    (tmp_path / "demo").write_text("seed: 7\n")  # a file precedes a name
    assert parsed("--config", "demo", "--data.root=x").seed == 7


def test_configurations_of_an_installed_package(tmp_path, monkeypatch) -> None:
    package = tmp_path / "site-packages" / "molflt"
    configs = package / "shipped" / "configs"
    configs.mkdir(parents=True)
    (configs / "demo.yaml").write_text("data: {root: ../datasets/some}\n")
    monkeypatch.setattr(shipped, "files", lambda _: package)
    assert config_names() == ["demo"]
    assert parsed("--config=demo").data.root == package / "shipped" / "datasets" / "some"


def test_paths_are_relative_to_the_configuration_that_names_them(tmp_path, monkeypatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "c.yaml").write_text("data: {root: ../data}\n")
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    assert parsed("--config", "../a/c.yaml").data.root == tmp_path / "data"
    assert parsed("--config=../a/c.yaml", "--data.root=mine").data.root == Path("mine")
    text = "recipe: language\ndata: {train: t.txt, val: 'hf:some/set:test'}\n"
    (tmp_path / "a" / "lm.yaml").write_text(text)
    data = parsed("--config", "../a/lm.yaml").data
    assert (data.train, str(data.val)) == (tmp_path / "a" / "t.txt", "hf:some/set:test")


def test_the_run_folder_contains_absolute_paths(tmp_path, monkeypatch) -> None:
    """Runs of earlier versions contain relative paths."""
    write_data(tmp_path / "data", 6, 3)
    monkeypatch.chdir(tmp_path)
    assert main(["train", *SMALL, *STEPS, "--data.root=data", "--run=runs/a"]) == 0
    saved = yaml.safe_load(Path("runs/a/config.yaml").read_text())
    assert (saved["data"]["root"], saved["run"]) == (f"{tmp_path}/data", f"{tmp_path}/runs/a")
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    assert main(["train", "--resume", "../runs/a", "--trainer.max_steps=3"]) == 0
    saved["data"]["root"], saved["run"] = "data", "runs/a"
    saved["trainer"]["max_steps"] = 3
    monkeypatch.chdir(tmp_path)
    Path("runs/a/config.yaml").write_text(yaml.safe_dump(saved))
    assert main(["evaluate", "runs/a", "--device=cpu"]) == 0
    assert main(["train", "--resume", "runs/a", "--trainer.max_steps=4"]) == 0
    assert yaml.safe_load(Path("runs/a/config.yaml").read_text())["data"]["root"].startswith("/")
