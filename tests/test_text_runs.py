import csv
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from recipe_runs import ORDERED, TOPICS, data_of, evaluated, trained
from safetensors.torch import load_file, save_file
from script_files import load_script
from sequence.test_encoder import published
from tiny_run import error_of, logged, page_of, printed, results_of, table
from token_files import write_folder

import molflt
from molflt.commands.cli import main
from molflt.data.text.sentences import GLUE
from molflt.data.text.tokenizer import Tokenizer
from molflt.data.text.vocabulary import Vocabulary
from molflt.evaluation import translation
from molflt.evaluation.language import official
from molflt.sequence import EncoderDecoder, MaskedLanguageModel, SequenceClassifier
from molflt.tasks.masked import Draws, MaskedTask, hide, swap_parts
from molflt.tasks.sentences import SentenceTask
from molflt.training.checkpoint import load_run

pytest.importorskip("tokenizers")
pytest.importorskip("sacrebleu")


def predicted(capsys, run: Path, folder: Path, text: str) -> list[dict[str, str]]:
    """Returns the rows that ``molflt predict`` prints for a text."""
    (folder / "given.txt").write_text(f"{text}\n")
    said = printed(capsys, "predict", run, folder / "given.txt", "--device=cpu").out
    return list(csv.DictReader(said.splitlines()))


# --- language models ----------------------------------------------------------------------------


def test_evaluation_counts_every_token_once(tmp_path, monkeypatch) -> None:
    run, results = trained("language"), evaluated("language")
    assert list(results) == ["val", "test"]
    assert np.log2(logged(run, "val_perplexity")) == pytest.approx(
        logged(run, "val_bits_per_token"), rel=1e-9
    )
    model, _ = load_run(run)
    vocabulary = Vocabulary.from_json((run / "vocabulary.json").read_bytes())
    assert set(vocabulary.tokens) == {*ORDERED, "<eos>", "<unk>"}
    for name, found in results.items():
        ids = vocabulary.encode((data_of("language") / f"{name}.txt").read_text())
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
    for name in ("losses", "attention", "encoding"):
        assert (run / f"{name}.png").stat().st_size > 1000
    text = tmp_path / "other.txt"
    text.write_text("a mat and\n")
    drawn: list[int] = []  # the figure does not show padding
    monkeypatch.setattr(
        "molflt.plots.attention_matrices", lambda x, *_, **__: drawn.extend(x.shape)
    )
    found = results_of(run, "--data", text, "--batch-size=3", out=tmp_path)["other.txt"]
    assert found["tokens"] == 4 and found["nearest"] is not None and drawn[1:] == [4, 4]


def test_generated_text(tmp_path, capsys) -> None:
    run = trained("language")
    words = ["--prompt=the cat", "--tokens=6", "--temperature=0"]
    greedy = printed(capsys, "generate", run, *words).out
    assert greedy.startswith("the cat sat on a mat")
    words = ["generate", run, "--tokens=30", "--top-k=5"]
    drawn = [printed(capsys, *words, f"--seed={seed}").out for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert {*" ".join(drawn).split()} <= {*ORDERED, "<unk>"}
    model = molflt.load(run)
    model.save_pretrained(tmp_path / "writer")
    text = model.generate("the cat", tokens=12, seed=3)
    words = [str(tmp_path / "writer"), "--prompt=the cat", "--tokens=12", "--seed=3"]
    assert printed(capsys, "generate", *words).out == f"{text}\n"


def test_a_changed_vocabulary_is_refused(tmp_path, capsys) -> None:
    """A vocabulary in another order would silently exchange words."""
    copy = shutil.copytree(trained("language"), tmp_path / "run")
    own = Vocabulary.from_json((copy / "vocabulary.json").read_bytes()).tokens
    tokens = [*own[:-2], own[-1], own[-2]]
    (copy / "vocabulary.json").write_bytes(Vocabulary("word", tokens).to_json())
    for command in ("evaluate", "generate"):
        assert "vocabulary.json" in error_of(capsys, command, str(copy))
    assert "changed" in error_of(capsys, "train", "--resume", str(copy), "--trainer.max_steps=130")


def test_a_diverged_model_does_not_have_a_perplexity(tmp_path) -> None:
    copy = shutil.copytree(trained("language"), tmp_path / "run")
    path = copy / "checkpoints" / "best.safetensors"
    state = load_file(path)
    state["head.weight"] *= 1e5
    save_file(state, path, {"format": "pt"})
    found = results_of(copy, "--splits", "val")["val"]
    assert found["perplexity"] is None and found["bits_per_token"] > 1010


# --- masked models ------------------------------------------------------------------------------


def test_tokens_are_masked_as_in_bert() -> None:
    """15 % of ordinary tokens: 80 % of these are masked, 10 % replaced, and 10 % kept."""
    vocabulary, mask_id = 50, torch.tensor(4)
    ordinary = torch.arange(vocabulary) > 4
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


def test_validation_masks_depend_on_the_sequence_only() -> None:
    tokens, there = torch.randint(5, 40, (3, 12)), torch.ones(3, 12, dtype=torch.bool)
    there[1, 7:] = False
    first = Draws.of_content(tokens, there)
    single = Draws.of_content(tokens[1:2, :7], there[1:2, :7])
    assert torch.equal(single.tokens[:, 0], first.tokens[:, 1, :7])
    assert single.sequences[0] == first.sequences[1] and (first.tokens[:, 1, 7:] == 1).all()
    assert not torch.equal(first.tokens[:, 0], first.tokens[:, 2])


def test_half_of_the_pairs_get_another_second_part() -> None:
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


def test_a_single_sequence_does_not_count_as_a_pair() -> None:
    """Its second part is not exchanged, and a constant answer would always be correct."""
    sizes = {"dim": 8, "heads": 2, "layers": 1, "ffn_dim": 8, "max_length": 6}
    model = MaskedLanguageModel(40, next_sentence=True, **sizes).eval()
    model.set_special(4, [0, 1, 2, 3])
    tokens, types = torch.randint(5, 40, (2, 6)), torch.tensor([0, 0, 0, 1, 1, 1]).expand(2, -1)
    batch = tokens, types, torch.ones(2, 6, dtype=torch.bool)
    task = MaskedTask(model, mask_rate=0.9)
    assert task.validation_sums(batch).pairs == 2
    one = task.validation_sums(tuple(part[:1] for part in batch))
    assert one.gaps > 0 and "next_sentence_percent" not in one.metrics()


def test_masked_words_are_predicted(tmp_path, capsys) -> None:
    run = trained("masked_language")
    assert logged(run, "val_next_sentence_percent")[-1] > 55
    result = evaluated("masked_language")["val"]
    assert {"accuracy_percent", "next_sentence_percent", "gaps"} < result.keys()
    assert (run / "attention.png").stat().st_size > 1000
    text = "cat dog [MASK] cow cat cow dog"
    (best,) = molflt.load(run).fill(text, count=3)
    assert {one.name for one in best} == set(TOPICS[0])
    (every,) = molflt.load(run).fill(text, count=10**6)
    assert sum(one.probability for one in every) == pytest.approx(1, abs=1e-5)
    assert best[0].probability > best[2].probability > 0
    said = predicted(capsys, run, tmp_path, text)
    assert [(row["piece"], float(row["probability"])) for row in said[:3]] == best
    words = ["predict", run, tmp_path / "given.txt", "--batch-size=2"]  # predicts line by line
    assert "--batch-size" in error_of(capsys, *words)


def started(init: Path, run: Path) -> list[str]:
    """Starts a run of the recipe for sentences from masked weights, and returns the command."""
    words = ["train", "--recipe=sentences", "--data.task=RTE", "--trainer.max_steps=1"]
    words += [f"--data.root={data_of('sentences')}", "--trainer.accelerator=cpu", f"--run={run}"]
    words.append(f"--init={init}")
    assert main(words) == 0
    record = json.loads((run / "init.json").read_text())
    assert set(record["new"]) == {"classify.weight", "classify.bias"}
    return words


def test_runs_start_from_runs_of_masked_models(tmp_path) -> None:
    source = trained("masked_language")
    started(source, tmp_path / "run")
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "max_length: 32" in config and f"tokenizer: {source}" in config


@pytest.mark.parametrize("kind", ["Bert", "FNet"])
def test_runs_start_from_published_weights(kind, tmp_path, capsys) -> None:
    text = (data_of("masked_language") / "train.txt").read_text()
    tokenizer = Tokenizer.train("wordpiece", [text], 60, True)
    source = tmp_path / "published"
    sizes = {"max_position_embeddings": 40, "vocab_size": len(tokenizer)}
    sizes["vocab_size"] += 5 * (kind == "Bert")  # some matrices have more rows than tokens
    published(kind, source, hidden_size=32, **sizes)
    (source / "tokenizer.json").write_bytes(tokenizer.to_json())
    words = started(source / "model.safetensors" if kind == "Bert" else source, tmp_path / "run")
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "max_length: 40" in config and f"tokenizer: {source}" in config
    assert ("mixer: fourier" in config) == (kind == "FNet")
    (source / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert "--data.tokenizer" in error_of(capsys, *words[:-2], words[-1], "--run=again")


# --- sentences ----------------------------------------------------------------------------------


def test_all_ways_to_classify_agree(tmp_path, capsys) -> None:
    run, result = trained("sentences"), evaluated("sentences")["val"]
    assert result["glue_percent"] == result["accuracy_percent"] and result["n"] == 60
    rows = (run / "predictions.csv").read_text().splitlines()
    assert rows[0] == "split,index,label,predicted" and len(rows) == 61
    assert "accuracy / % ↑" in page_of(run)
    assert main(["export", str(run), str(tmp_path / "out"), "--about", "good or bad"]) == 0
    texts = ["the cat is good", "the house is awful"]
    labels = [molflt.load(path).classify(texts) for path in (run, tmp_path / "out")]
    assert labels[0] == labels[1] and [one.name for one in labels[0]] == ["1", "0"]
    assert predicted(capsys, run, tmp_path, "\n".join(texts)) == [
        {"line": str(line), "label": one.name, "probability": str(one.probability)}
        for line, one in enumerate(labels[0], 1)
    ]
    molflt.load(run).classify([" ".join(100 * texts)])
    with pytest.raises(ValueError, match="length must be at least 5; got 2"):
        molflt.load(run).classify(texts, length=2)
    assert "1 of 1" in capsys.readouterr().err  # was cut


def test_scores_are_predicted(tmp_path, capsys) -> None:
    run = trained("scores")
    assert not table(run / "metrics.csv")[-1].get("val_accuracy_percent")
    score = molflt.load(run).classify([("a cat", "a cat")])[0]
    assert score.name == "score"
    said = predicted(capsys, run, tmp_path, "a cat\ta cat")
    assert said == [{"line": "1", "score": str(score.probability)}]


@pytest.mark.parametrize("task", GLUE)
def test_sums_agree_with_the_official_metrics(task) -> None:
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
    mean = np.mean([exact[f"{one}_percent"] for one in GLUE[task].metrics])
    assert exact["glue_percent"] == pytest.approx(mean)
    for count in (50, 1):
        constant = official(task, np.zeros(count), label[:count].astype(float))
        assert all(np.isfinite(value) for value in constant.values())
    if classes is None:
        with pytest.raises(ValueError, match="'accuracy'"):
            SentenceTask(model, measure="accuracy")


def test_the_table_and_the_steps_of_glue(tmp_path, monkeypatch) -> None:
    glue, made = load_script("glue"), {}
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
    monkeypatch.setattr(glue, "work_all", lambda jobs, _: made.update(jobs) or 0)
    words = ["--init=a", f"--root={data_of('sentences')}", f"--out={tmp_path}", "--tasks=RTE"]
    assert glue.main([*words, "--epochs=2", "--", "--data.batch_size", "24"]) == 0
    assert {"--trainer.max_steps=20", "--trainer.val_every=10"} < {*made.popitem()[1]["words"]}


# --- translation --------------------------------------------------------------------------------


def test_translations_are_scored_by_sacrebleu() -> None:
    run, results = trained("translation"), evaluated("translation")
    assert results["test"]["bleu"] > 50 and results["test"]["pairs"] == 20
    translations = (run / "translations-test.txt").read_text().splitlines()
    references = (data_of("translation") / "test.en").read_text().splitlines()
    score = translation.bleu(translations, references)
    assert score.bleu == pytest.approx(results["test"]["bleu"])
    assert page_of(run).count("<img") == 3  # curve, attention, cross-attention


def test_all_ways_to_translate_agree(tmp_path, capsys) -> None:
    run, files = trained("translation"), data_of("translation")
    lines = (files / "test.de").read_text().splitlines()[:3]
    expected = molflt.load(run).translate(lines)
    (tmp_path / "in.txt").write_text("\n".join(lines) + "\n")
    words = ["generate", str(run), "--file", str(tmp_path / "in.txt")]
    assert printed(capsys, *words).out.splitlines() == expected
    (tmp_path / "in.txt").write_text(f"{lines[0]}\n\n")
    assert f"{tmp_path / 'in.txt'}: " in (line := error_of(capsys, *words)) and "line 2" in line
    assert main(["export", str(run), str(tmp_path / "out"), "--about", "de-en"]) == 0
    words = ["generate", str(tmp_path / "out"), "--prompt", lines[0], "--beam", "5"]
    assert printed(capsys, *words).out.strip() == expected[0]
    words = ["evaluate", str(run), "--data", str(files / "test"), f"--out={tmp_path}", "--beam=2"]
    said = printed(capsys, *words).out
    assert "sacrebleu nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:" in said
    assert "beam 2" in said


@pytest.mark.parametrize("lowercase", [True, False])
def test_bleu_ignores_case_if_the_tokenizer_does(lowercase, tmp_path, monkeypatch) -> None:
    """This holds even if no option of the run requests it."""
    lines = ["The Cat sat on Anna's Mat in Berlin.", "A Dog met Peter in the Park."] * 3
    for name in ("v.de", "v.en"):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    tokenizer = Tokenizer.train("bpe", lines, 90, lowercase)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.to_json())
    model = EncoderDecoder(len(tokenizer), dim=16, heads=2, layers=1, max_length=90).eval()
    options = {"source": "de", "target": "en", "lowercase": None, "val": tmp_path / "v"}
    config = {"data": options | {"train": None, "test": None}}
    monkeypatch.setattr(
        translation,
        "translate",
        lambda _, own, texts, *__: [own.decode(ids) for ids in own.encode(texts)],
    )
    report = translation.evaluate(tmp_path, model, config, tmp_path)
    assert report.results["val"]["bleu"] == pytest.approx(100)
    assert report.results["val"]["chrf"] == pytest.approx(100)
    assert ("case:lc" in report.text) == lowercase


def test_conversion_of_a_trained_model(capsys) -> None:
    """Few random features lose nearly all of the BLEU score, but many keep much of it (fig. 2)."""
    script, run = load_script("conversion"), str(trained("translation"))
    capsys.readouterr()
    assert script.main([run, "--features", "4", "512", "--draws", "2", "--beam", "1"]) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "|" in line][2:]
    found = {row[1].strip(): float(row[2].split("±")[0]) for row in rows}
    whole, few, many = (found[key] for key in ("softmax, as trained", "4 features", "512 features"))
    assert len(found) == 3 and few < 0.3 * whole and many > 3 * few


def test_gray_images(tmp_path: Path) -> None:
    """A run keeps the names of its classes: a test folder may contain fewer of them."""
    write_folder(tmp_path / "Image" / "train", count=4, side=4)
    write_folder(tmp_path / "Image" / "test", count=2, side=4)
    other = write_folder(tmp_path / "other", count=2, side=4, classes="dog")
    run = tmp_path / "run"
    words = ["train", "--recipe=sentences", "--data.task=Image", f"--data.root={tmp_path}"]
    words += ["--model.dim=16", "--model.heads=2", "--model.layers=1", "--model.mixer=fourier"]
    words += ["--model.max_length=24", "--data.length=24", "--data.val_fraction=0.25"]
    assert main([*words, "--trainer.max_steps=2", "--trainer.accelerator=cpu", f"--run={run}"]) == 0
    assert json.loads((run / "classes.json").read_text()) == ["cat", "dog", "eel"]
    found = results_of(run, "--splits", "val", "test")
    assert found["val"]["accuracy_percent"] == pytest.approx(logged(run, "val_score_percent")[-1])
    assert found["test"]["n"] == 6
    assert main(["evaluate", str(run), "--data", str(other)]) == 0
    lines = (run / "predictions.csv").read_text().splitlines()
    assert [line.split(",")[2] for line in lines[1:]] == ["dog", "dog"]
