"""A language model from text files to perplexities and new text, on the command line."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_run import differences, error_of, last_state, logged, table

import molflt
from molflt.commands.cli import main
from molflt.data.text.vocabulary import Vocabulary
from molflt.sequence import LanguageModel
from molflt.tasks.language import LanguageTask
from molflt.training.checkpoint import load_run

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "dog", "run", "far", "away"]
SMALL = [
    *("--recipe=language", "--model.dim=16", "--model.heads=2", "--model.layers=1"),
    *("--model.ffn_dim=16", "--model.num_features=8", "--data.length=16", "--data.batch_size=4"),
    *("--task.warmup_steps=2", "--task.lr=1e-2", "--trainer.accelerator=cpu"),
    *("--trainer.log_every=10", "--trainer.val_every=10", "--model.dropout=0.1"),
]


def write_text(path: Path, lines: int, seed: int) -> None:
    """Writes lines in which most words are followed by the next one of a fixed order."""
    draw = np.random.default_rng(seed)
    text = []
    for _ in range(lines):
        place = int(draw.integers(len(WORDS)))
        line = []
        for _ in range(int(draw.integers(3, 12))):
            line.append(WORDS[place])
            place = int(draw.integers(len(WORDS))) if draw.random() < 0.1 else place + 1
            place %= len(WORDS)
        text.append(" ".join(line))
    path.write_text("\n".join(text) + "\n")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for seed, (name, lines) in enumerate({"train": 200, "val": 31, "test": 20}.items()):
        write_text(folder / f"{name}.txt", lines, seed)
    return folder


def arguments(texts: Path, run: Path, *more: str) -> list[str]:
    files = [f"--data.{name}={texts / name}.txt" for name in ("train", "val", "test")]
    return ["train", *SMALL, *files, f"--run={run}", *more]


@pytest.fixture(scope="module")
def run(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = ["--trainer.max_steps=120", "--model.position=spectral", "--trainer.val_every=40"]
    assert main(arguments(texts, folder, *words)) == 0
    return folder


def vocabulary_of(run: Path) -> Vocabulary:
    return Vocabulary.from_json((run / "vocabulary.json").read_bytes())


def test_training_learns_the_order_of_words(run: Path) -> None:
    found = logged(run, "val_perplexity")
    assert len(found) == 3
    assert found[-1] < 0.8 * found[0] and found[-1] < 4.5 < len(WORDS)
    assert np.log2(found) == pytest.approx(logged(run, "val_bits_per_token"), rel=1e-9)
    assert {"train_perplexity", "tokens_per_s"} < table(run / "metrics.csv")[0].keys()
    assert (run / "curve.png").stat().st_size > 1000
    model, config = load_run(run)
    assert set(vocabulary_of(run).tokens) == {*WORDS, "<eos>", "<unk>"}
    assert config["model"]["vocabulary"] == model.vocabulary == len(WORDS) + 2


def test_evaluation_counts_every_token_once(texts: Path, run: Path, tmp_path: Path) -> None:
    words = ["evaluate", str(run), "--out", str(tmp_path), "--batch-size", "3"]
    assert main(words) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results) == ["val", "test"]
    model, _ = load_run(run)
    vocabulary = vocabulary_of(run)
    for name, found in results.items():
        ids = vocabulary.encode((texts / f"{name}.txt").read_text())
        assert found["tokens"] == len(ids)
        nats = 0.0
        stream = torch.cat((torch.tensor([vocabulary.eos]), ids))
        for start in range(0, len(ids), 16):
            piece = stream[start : start + 17][None]
            with torch.no_grad():
                score = model.log_probabilities(model(piece[:, :-1]))
            nats -= float(score.gather(2, piece[:, 1:, None]).double().sum())
        assert found["perplexity"] == pytest.approx(math.exp(nats / len(ids)), rel=1e-5)
        assert 0 < found["nearest"] < 1 and 0 < found["farthest"] < 1
    validated = min(logged(run, "val_perplexity"))
    assert results["val"]["perplexity"] == pytest.approx(validated, rel=1e-5)
    for name in ("losses", "attention", "encoding"):
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
    text = tmp_path / "other.txt"
    text.write_text("a mat and\n")
    assert main(["evaluate", str(run), "--data", str(text), "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "results.json").read_text())["other.txt"]
    assert found["tokens"] == 4 and found["nearest"] is not None


def test_generated_text(run: Path, tmp_path: Path, capsys) -> None:
    """Greedy text, draws of a seed, and the same text from Python and from saved weights."""

    def generate(path: Path, *words: str) -> str:
        capsys.readouterr()
        assert main(["generate", str(path), *words]) == 0
        return capsys.readouterr().out

    greedy = generate(run, "--prompt=the cat", "--tokens=6", "--temperature=0")
    assert greedy.startswith("the cat sat on a mat")
    drawn = [generate(run, "--tokens=30", "--top-k=5", f"--seed={seed}") for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert {*" ".join(drawn).split()} <= {*WORDS, "<unk>"}
    model = molflt.load(run)
    model.save_pretrained(tmp_path / "writer")
    text = model.generate("the cat", tokens=12, seed=3)
    assert text.startswith("the cat") and len(text.split()) > 8
    for path in (run, tmp_path / "writer"):
        assert generate(path, "--prompt=the cat", "--tokens=12", "--seed=3") == f"{text}\n"


def test_a_resumed_run_has_the_same_weights(texts: Path, tmp_path: Path) -> None:
    words = ["--trainer.checkpoint_every=5", "--task.redraw_every=4"]
    words += ["--task.schedule=inverse_sqrt"]
    for name, steps in (("whole", 12), ("half", 7)):
        more = [*words, f"--trainer.max_steps={steps}"]
        assert main(arguments(texts, tmp_path / name, *more)) == 0
    assert main(["train", "--resume", str(tmp_path / "half"), "--trainer.max_steps=12"]) == 0
    whole, half = (last_state(tmp_path / name)["state_dict"] for name in ("whole", "half"))
    assert differences(whole, half) == []


def test_a_changed_vocabulary_is_refused(run: Path, tmp_path: Path, capsys) -> None:
    """Words of the same number would silently take the places of others."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    own = vocabulary_of(run).tokens
    for tokens in (["<eos>", "<unk>", "one", "two"], [*own[:-2], own[-1], own[-2]]):
        (copy / "vocabulary.json").write_bytes(Vocabulary("word", tokens).to_json())
        for command in ("evaluate", "generate"):
            assert "vocabulary.json" in error_of(capsys, command, str(copy))
    assert "changed" in error_of(capsys, "train", "--resume", str(copy), "--trainer.max_steps=130")


def test_a_diverged_model_does_not_have_a_perplexity(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    path = copy / "checkpoints" / "best.safetensors"
    with safe_open(path, "pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    state["head.weight"] *= 1e5
    save_file(state, path)
    assert main(["evaluate", str(copy), "--splits", "val"]) == 0
    found = json.loads((copy / "results.json").read_text())["val"]
    assert found["perplexity"] is None and found["bits_per_token"] > 1010


def test_perplexity_of_sums() -> None:
    task = LanguageTask(LanguageModel(7, 8, 2, layers=1))
    metrics = task.summarize(torch.tensor([2 * math.log(8.0), 2.0], dtype=torch.float64))
    assert metrics == pytest.approx({"perplexity": 8.0, "bits_per_token": 3.0})
    endless = task.summarize(torch.tensor([5000.0, 2.0], dtype=torch.float64))
    assert endless["perplexity"] == math.inf
    inputs, targets = torch.randint(7, (2, 3, 5))
    targets[0, 2:] = -1
    loss, sums = task.loss((inputs, targets), 0.0)
    assert sums.tokens == 12
    assert float(loss) == pytest.approx(float(sums.nats) / 12, rel=1e-6)
    assert task.size((inputs, targets)) == 15
