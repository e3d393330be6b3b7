"""Masked models and classifiers of sentences: random draws, and runs on the command line."""

from __future__ import annotations

import csv
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from script_files import load_script
from tiny_run import differences, last_state, logged, page_of, table
from token_files import write_sentences

import molflt
from molflt.commands.cli import main
from molflt.data.text.glue import GLUE
from molflt.data.text.tokenized import read_pieces
from molflt.data.text.tokenizer import Tokenizer
from molflt.evaluation.sentences import official
from molflt.sequence import MaskedLanguageModel, SequenceClassifier
from molflt.tasks.masked import Draws, MaskedTask, hide, swap_parts
from molflt.tasks.sentences import SentenceTask

pytest.importorskip("tokenizers")
SIZE = [
    *("--model.dim=32", "--model.heads=2", "--model.layers=2", "--model.ffn_dim=32"),
    *("--model.max_length=32", "--model.mixing=softmax", "--model.dropout=0.1"),
]
STEPS = ["--trainer.accelerator=cpu", "--task.warmup_steps=5", "--trainer.log_every=10"]

TOPICS = [["cat", "dog", "cow"], ["red", "blue", "green"], ["run", "walk", "jump"]]


def write_topics(path: Path, lines: int, seed: int) -> None:
    """Writes lines of 26 words of one topic each, from which a masked word can be inferred."""
    draw = np.random.default_rng(seed)
    topics = [TOPICS[draw.integers(len(TOPICS))] for _ in range(lines)]
    path.write_text("".join(" ".join(draw.choice(topic, 26)) + "\n" for topic in topics))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("masked")
    for seed, (name, lines) in enumerate({"train": 120, "val": 40}.items()):
        write_topics(root / f"{name}.txt", lines, seed)
    for task in ("RTE", "SST-2", "STS-B", "CoLA"):
        write_sentences(root, task, 240, 60)
    return root


def masked(folder: Path, run: Path, *more: str) -> list[str]:
    texts = [f"--data.{name}={folder / name}.txt" for name in ("train", "val")]
    data = [*texts, "--data.pieces=60", "--data.length=16", "--data.batch_size=16"]
    words = ["train", "--recipe=masked_language", *SIZE, *STEPS, *data, "--task.lr=5e-3"]
    return [*words, "--data.next_sentence=true", f"--run={run}", *more]


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "masked"
    assert main(masked(folder, path, "--trainer.max_steps=160", "--trainer.val_every=40")) == 0
    return path


def test_tokens_are_masked_as_in_bert():
    """15 % of ordinary tokens: 80 % of these are masked, 10 % replaced, and 10 % kept."""
    vocabulary, mask_id = 50, torch.tensor(4)
    ordinary = torch.arange(vocabulary) > 4
    torch.manual_seed(0)
    tokens = torch.randint(vocabulary, (200, 500))
    there = torch.rand(200, 500) < 0.9
    seen, targets = hide(tokens, there, Draws.new(tokens).tokens, mask_id, ordinary)
    told = targets >= 0
    assert torch.equal(targets[told], tokens[told]) and torch.equal(seen[~told], tokens[~told])
    assert (there & ordinary[tokens])[told].all() and ordinary[seen[told & (seen != 4)]].all()
    allowed = (there & ordinary[tokens]).sum()
    count = told.sum()
    assert count / allowed == pytest.approx(0.15, abs=0.005)
    assert (seen[told] == 4).sum() / count == pytest.approx(0.8, abs=0.015)
    assert (seen[told] == tokens[told]).sum() / count == pytest.approx(0.1 + 0.1 / 45, abs=0.01)
    drawn = seen[told & (seen != 4) & (seen != tokens)]
    assert torch.bincount(drawn, minlength=50)[5:].min() > 0


def test_validation_masks_depend_on_the_sequence_only():
    tokens, there = torch.randint(5, 40, (3, 12)), torch.ones(3, 12, dtype=torch.bool)
    there[1, 7:] = False
    first = Draws.of_content(tokens, there)
    single = Draws.of_content(tokens[1:2, :7], there[1:2, :7])
    assert torch.equal(single.tokens[:, 0], first.tokens[:, 1, :7])
    assert single.sequences[0] == first.sequences[1] and (first.tokens[:, 1, 7:] == 1).all()
    assert not torch.equal(first.tokens[:, 0], first.tokens[:, 2])


def test_texts_without_masked_tokens_are_refused(tmp_path):
    """Their perplexity would be 1, the best possible value."""
    for name, content in (("good", "MKVLAWGDERMKVLAWGDERMKVLAWGDER\n"), ("short", "h\n")):
        (tmp_path / f"{name}.txt").write_text(content)
    tokenizer = Tokenizer.train("byte", [], 0, False)
    model = MaskedLanguageModel(len(tokenizer), dim=16, heads=2, layers=1, max_length=40).eval()
    task = MaskedTask(model)
    for name, expected in (
        ("good", nullcontext()),
        ("short", pytest.raises(ValueError, match="short")),
    ):
        blocks = read_pieces(str(tmp_path / f"{name}.txt"), tokenizer, 40)
        data = SimpleNamespace(tokenizer=tokenizer, datasets={"val": blocks}, sources={"val": name})
        with expected:
            task.prepare(data)


def test_half_of_the_pairs_get_another_second_part():
    torch.manual_seed(0)
    tokens = torch.arange(400)[:, None].expand(-1, 6)
    types = torch.tensor([0, 0, 0, 1, 1, 1]).expand(400, -1)
    there = torch.ones(400, 6, dtype=torch.bool)
    there[7, 5] = False
    draws = torch.rand(400)
    draws[8] = 0.0
    found, seen, label = swap_parts(tokens, types, there, draws)
    assert torch.equal(found[:, :3], tokens[:, :3]) and 160 < label.sum() < 240
    assert torch.equal(found[:, 3], (torch.arange(400) - label) % 400)
    assert not seen[8, 5] and label[8] == 1
    one = swap_parts(tokens[:1], types[:1], there[:1], torch.zeros(1))
    assert torch.equal(one[0], tokens[:1]) and one[2].item() == 0  # nothing to swap with


def test_sums_of_batches_add_up():
    torch.manual_seed(0)
    sizes = {"dim": 16, "heads": 2, "layers": 1, "max_length": 12}
    model = MaskedLanguageModel(30, **sizes).eval()
    model.set_special(4, [0, 1, 2, 3])
    task = MaskedTask(model, mask_rate=0.5)
    tokens = torch.randint(5, 30, (6, 12))
    batch = (tokens, torch.zeros_like(tokens), torch.ones_like(tokens).bool())
    whole = task.judge(batch)
    parts = [task.judge(tuple(part[i : i + 2] for part in batch)) for i in (0, 2, 4)]
    torch.testing.assert_close(
        torch.stack([sum(p) for p in zip(*parts, strict=True)]), torch.stack([*whole])
    )
    draws = Draws.of_content(tokens, batch[2])
    seen, targets = hide(tokens, batch[2], draws.tokens, model.mask_id, model.ordinary, 0.5)
    log_p = model.log_probabilities(model(seen))[targets >= 0]
    wanted = targets[targets >= 0]
    assert float(whole.nats) == pytest.approx(
        -float(log_p.gather(1, wanted[:, None]).detach().sum()), rel=1e-5
    )
    assert whole.right == (log_p.argmax(1) == wanted).sum() and whole.gaps == len(wanted)
    assert "next_sentence_percent" not in whole.metrics()
    with pytest.raises(ValueError, match="0.8 and 0.3"):
        MaskedTask(model, random_share=0.3)


def predicted(capsys, run: Path, folder: Path, text: str) -> list[dict[str, str]]:
    """Returns the rows that ``molflt predict`` prints for a text."""
    (folder / "given.txt").write_text(f"{text}\n")
    capsys.readouterr()
    assert main(["predict", str(run), str(folder / "given.txt"), "--device=cpu"]) == 0
    return list(csv.DictReader(capsys.readouterr().out.splitlines()))


def test_masked_words_are_predicted(run, folder, tmp_path, capsys):
    found = logged(run, "val_perplexity")
    assert found[-1] < 0.6 * found[0] and found[-1] < 5  # 9 words, 3 of each topic
    assert logged(run, "val_next_sentence_percent")[-1] > 55
    assert main(["evaluate", str(run), "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "results.json").read_text())["val"]
    assert result["perplexity"] == pytest.approx(min(found), rel=1e-5)
    assert {"accuracy_percent", "next_sentence_percent", "gaps"} < result.keys()
    assert (tmp_path / "attention.png").stat().st_size > 1000
    text = (folder / "train.txt").read_text().splitlines()[0].split()
    text[1] = "[MASK]"
    said = predicted(capsys, run, tmp_path, " ".join(text))
    best = molflt.load(run).fill(" ".join(text))[0]
    assert [(row["piece"], float(row["probability"])) for row in said] == best
    model = molflt.load(run)
    found = model.fill("cat dog [MASK] cow cat cow dog", count=3)
    assert len(found) == 1 and {one.name for one in found[0]} == set(TOPICS[0])
    assert found[0][0].probability > found[0][2].probability > 0


def test_a_resumed_run_has_the_same_weights(folder, tmp_path):
    """With the masks and swaps of every step, and the tokenizer of the run."""
    steps = ["--trainer.val_every=3", "--trainer.max_steps=6", "--task.warmup_steps=2"]
    whole, half = tmp_path / "whole", tmp_path / "half"
    assert main(masked(folder, whole, *steps, "--task.schedule=inverse_sqrt")) == 0
    given = f"--data.tokenizer={whole}"
    words = [word for word in masked(folder, half, *steps, given) if "pieces" not in word]
    assert main([*words, "--task.schedule=inverse_sqrt", "--trainer.max_steps=3"]) == 0
    assert main(["train", "--resume", str(half), "--trainer.max_steps=6"]) == 0
    one, two = (last_state(path)["state_dict"] for path in (whole, half))
    assert differences(one, two) == []
    learned = tmp_path / "learned"
    assert main(masked(folder, learned, *steps, "--trainer.max_steps=3")) == 0
    assert main(["train", "--resume", str(learned), "--trainer.max_steps=4"]) == 0


def sentences(folder: Path, task: str, run: Path, *more: str) -> list[str]:
    words = ["train", "--recipe=sentences", f"--data.task={task}", f"--data.root={folder}"]
    steps = ["--data.length=24", "--task.lr=3e-3", "--trainer.max_steps=60"]
    return [*words, *STEPS, *steps, "--trainer.val_every=30", f"--run={run}", *more]


def test_fine_tuning_starts_from_the_encoder(run, folder, tmp_path):
    """Its options and its tokenizer are used as well."""
    tuned = tmp_path / "tuned"
    assert main(sentences(folder, "SST-2", tuned, f"--init={run}", "--trainer.max_steps=3")) == 0
    record = json.loads((tuned / "init.json").read_text())
    assert set(record["new"]) == {"classify.weight", "classify.bias"}
    assert "encoder.words.weight" in record["loaded"] and "pooler.weight" in record["loaded"]
    assert {"head.bias", "next_sentence.weight"} <= record["left_over"].keys()
    assert (tuned / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    again = sentences(folder, "RTE", tmp_path / "again", f"--init={tuned}", "--trainer.max_steps=2")
    assert main(again) == 0
    record = json.loads((tmp_path / "again" / "init.json").read_text())
    assert "classes.json" in record["new"]["classify.weight"]["why"]


@pytest.fixture(scope="module")
def classifier(folder, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "classifier"
    assert main(sentences(folder, "SST-2", path, *SIZE, "--data.pieces=80")) == 0
    assert main(["evaluate", str(path)]) == 0
    return path


def test_sentences_are_learned_and_evaluated(classifier):
    assert logged(classifier, "val_accuracy_percent")[-1] > 90
    result = json.loads((classifier / "results.json").read_text())["val"]
    best = max(logged(classifier, "val_score_percent"))
    assert result["accuracy_percent"] == pytest.approx(best)
    assert result["glue_percent"] == result["accuracy_percent"] and result["n"] == 60
    rows = (classifier / "predictions.csv").read_text().splitlines()
    assert rows[0] == "split,index,label,predicted" and len(rows) == 61
    page = page_of(classifier)
    assert "What is missing" not in page and "accuracy / % ↑" in page


def test_all_ways_to_classify_agree(classifier, tmp_path, capsys):
    export = ["export", str(classifier), str(tmp_path / "out"), "--about", "good or bad"]
    assert main(export) == 0
    texts = ["the cat is good", "the house is awful"]
    labels = [molflt.load(path).classify(texts) for path in (classifier, tmp_path / "out")]
    assert labels[0] == labels[1] and [one.name for one in labels[0]] == ["1", "0"]
    assert predicted(capsys, classifier, tmp_path, "\n".join(texts)) == [
        {"line": str(line), "label": one.name, "probability": str(one.probability)}
        for line, one in enumerate(labels[0], 1)
    ]
    molflt.load(classifier).classify([" ".join(100 * texts)])
    assert "1 of 1" in capsys.readouterr().err  # was cut


def test_scores_are_learned(folder, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(sentences(folder, "STS-B", run, *SIZE, "--data.pieces=80")) == 0
    assert logged(run, "val_score_percent") and not table(run / "metrics.csv")[-1].get(
        "val_accuracy_percent"
    )
    assert main(["evaluate", str(run), "--device", "cpu"]) == 0
    result = json.loads((run / "results.json").read_text())["val"]
    assert result["pearson_percent"] == pytest.approx(
        max(logged(run, "val_score_percent")), rel=1e-4
    )
    score = molflt.load(run).classify([("a cat", "a cat")])[0]
    assert score.name == "score"
    said = predicted(capsys, run, tmp_path, "a cat\ta cat")
    assert said == [{"line": "1", "score": str(score.probability)}]


@pytest.mark.parametrize("kind", ["Bert", "FNet"])
def test_runs_start_from_published_weights(kind, folder, tmp_path):
    """From a folder of transformers, or its file of weights."""
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer.train("wordpiece", [(folder / "train.txt").read_text()], 60, True)
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "tokenizer.json").write_bytes(tokenizer.to_json())
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 24}
    sizes |= {"max_position_embeddings": 40, "vocab_size": len(tokenizer)}
    sizes |= {"num_attention_heads": 4} if kind == "Bert" else {}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    getattr(transformers, f"{kind}ForPreTraining")(config).save_pretrained(tmp_path / "published")
    for name in ("", "model.safetensors"):
        source, run = tmp_path / "published" / name, tmp_path / f"run-{name}"
        assert main(sentences(folder, "RTE", run, f"--init={source}", "--trainer.max_steps=1")) == 0
        record = json.loads((run / "init.json").read_text())
        assert set(record["new"]) == {"classify.weight", "classify.bias"}
        config = (run / "config.yaml").read_text()
        assert "max_length: 40" in config and f"tokenizer: {tmp_path / 'published'}" in config
        assert ("mixer: fourier" in config) == (kind == "FNet")


@pytest.mark.parametrize("task", GLUE)
def test_sums_agree_with_the_official_metrics(task):
    pytest.importorskip("sklearn")
    draw = np.random.default_rng(0)
    classes = GLUE[task].labels
    model = SequenceClassifier(9, len(classes or "1"), dim=8, heads=2, layers=1, max_length=4)
    learned = SentenceTask(model)
    label = draw.integers(len(classes), size=50) if classes else draw.uniform(0, 5, 50)
    noise = draw.integers(len(classes), size=50) if classes else label + draw.normal(size=50)
    told = np.where(draw.random(50) < 0.6, label, noise)
    sums = [
        SentenceTask.sums.of(torch.tensor(told[part]), torch.tensor(label[part]), torch.tensor(0.0))
        for part in (slice(20), slice(20, 50))
    ]
    found = learned.summarize(torch.stack([torch.stack([*one]) for one in sums]).sum(0))
    exact = official(task, told.astype(float), label.astype(float))
    mine = {"matthews": "correlation", "pearson": "correlation", "accuracy": "accuracy"}
    name = GLUE[task].metrics[0]
    assert found[f"{mine[name]}_percent"] == pytest.approx(exact[f"{name}_percent"], abs=1e-9)
    assert ("accuracy_percent" in found) == (classes is not None)
    mean = np.mean([exact[f"{one}_percent"] for one in GLUE[task].metrics])
    assert exact["glue_percent"] == pytest.approx(mean)
    constant = official(task, np.zeros(50), label.astype(float))
    assert all(np.isfinite(value) for value in constant.values())
    if classes is None:
        with pytest.raises(ValueError, match="'accuracy'"):
            SentenceTask(model, measure="accuracy")


def test_the_table_of_glue():
    """Contains medians over seeds and means over splits and metrics of a task."""
    glue = load_script("glue")
    values = {"val": (60.0, 70.0, 90.0), "val_mismatched": (50.0, 60.0, 80.0)}
    rows = [
        {"task": "MNLI", "seed": seed, "split": split, "accuracy_percent": x, "glue_percent": x}
        for split, of_seeds in values.items()
        for seed, x in enumerate(of_seeds)
    ]
    mrpc = {"accuracy_percent": 80.0, "f1_percent": 90.0, "glue_percent": 85.0}
    rows.append({"task": "MRPC", "split": "val", **mrpc})
    text = glue.table(rows, ["no QQP"])
    assert "| val_mismatched | 3 | accuracy 60.0 | 60.0 |" in text
    assert "accuracy 80.0, f1 90.0 | 85.0 |" in text
    assert "average of 2 of 8 tasks" in text and "| 75.0 |" in text and "no QQP" in text
