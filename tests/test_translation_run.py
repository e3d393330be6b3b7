"""Translation on the command line: train, resume, evaluate, translate, export, convert."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from script_files import load_script
from tiny_run import differences, error_of, last_state, logged, page_of
from token_files import write_pairs

import molflt
from molflt.commands.cli import main
from molflt.data.text.tokenizer import Tokenizer
from molflt.evaluation import translation
from molflt.evaluation.translation import bleu
from molflt.sequence.encoder_decoder import EncoderDecoder

pytest.importorskip("tokenizers")
pytest.importorskip("sacrebleu")
SMALL = [
    *("--recipe=translation", "--model.dim=32", "--model.heads=2", "--model.layers=1"),
    *("--model.ffn_dim=48", "--model.mixing=softmax"),
    *("--model.absolute=learned", "--model.max_length=40"),
    *("--data.source=de", "--data.target=en", "--data.batch_size=32", "--task.lr=5e-3"),
    *("--trainer.accelerator=cpu", "--trainer.log_every=10", "--task.warmup_steps=10"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("parallel")
    for seed, (name, count) in enumerate({"train": 600, "val": 40, "test": 20}.items()):
        write_pairs(root, name, count, seed)
    return root


def words(folder: Path, run: Path, *more: str) -> list[str]:
    files = [f"--data.{name}={folder / name}" for name in ("train", "val")]
    return ["train", *SMALL, *files, "--data.pieces=80", f"--run={run}", *more]


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "translation"
    steps = ["--trainer.max_steps=240", "--trainer.val_every=80", f"--data.test={folder / 'test'}"]
    assert main(words(folder, path, *steps)) == 0
    assert main(["evaluate", str(path), "--beam=2"]) == 0
    return path


def test_a_small_language_is_learned(run, folder):
    found = logged(run, "val_perplexity")
    assert found[-1] < 0.5 * found[0]
    results = json.loads((run / "results.json").read_text())
    assert results["val"]["perplexity"] == pytest.approx(min(found), rel=1e-4)
    assert results["test"]["bleu"] > 50 and results["test"]["pairs"] == 20
    translations = (run / "translations-test.txt").read_text().splitlines()
    references = (folder / "test.en").read_text().splitlines()
    assert bleu(translations, references).bleu == pytest.approx(results["test"]["bleu"])
    assert {"attention.png", "cross-attention.png", "curve.png"} <= {p.name for p in run.iterdir()}
    page = page_of(run)
    assert "What is missing" not in page and page.count("<img") == 3 and "BLEU" in page


def test_evaluation_of_other_files_names_its_settings(run, folder, tmp_path, capsys):
    words = ["evaluate", str(run), "--data", str(folder / "test"), f"--out={tmp_path}"]
    assert main([*words, "--beam=2"]) == 0
    printed = capsys.readouterr().out
    assert "sacrebleu nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:" in printed
    score = json.loads((run / "results.json").read_text())["test"]["bleu"]
    assert f"{score:.2f}" in printed and "beam 2" in printed


def test_all_ways_to_translate_agree(run, folder, tmp_path, capsys):
    lines = (folder / "test.de").read_text().splitlines()[:3]
    expected = molflt.load(run).translate(lines)
    (tmp_path / "in.txt").write_text("\n".join(lines) + "\n")
    assert main(["generate", str(run), "--file", str(tmp_path / "in.txt")]) == 0
    assert capsys.readouterr().out.splitlines() == expected
    assert main(["export", str(run), str(tmp_path / "out"), "--about", "de-en"]) == 0
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "out"), "--prompt", lines[0], "--beam", "5"]) == 0
    assert capsys.readouterr().out.strip() == expected[0]


def test_requests_that_cannot_be_translated(run, folder, tmp_path, capsys):
    for options, word in (
        (["--tokens=3"], "--tokens"),
        ([], "--prompt"),
        (["--prompt=" + 60 * "ein "], "sentence 1"),
    ):
        assert word in error_of(capsys, "generate", str(run), *options)
    for sentences, options, word in (
        ("ein Hund", {}, "ein Hund"),
        (["ein Hund"], {"batch_size": 0}, "batch_size"),
    ):
        with pytest.raises(ValueError, match=word):
            molflt.load(run).translate(sentences, **options)
    shutil.copytree(run, tmp_path / "other")
    kept = tmp_path / "other" / "tokenizer.json"
    kept.write_bytes(kept.read_bytes().replace(b"Hund", b"Hand"))
    assert "tokenizer.json" in error_of(capsys, "evaluate", str(kept.parent))
    (tmp_path / "x.de").write_text(60 * "ein " + "\n")
    (tmp_path / "x.en").write_text("one\n")
    message = error_of(capsys, "evaluate", str(run), "--data", str(tmp_path / "x"))
    assert "x.de: line 1" in message and "40" in message


def test_a_resumed_run_has_the_same_weights(folder, tmp_path):
    steps = ["--trainer.val_every=3", "--trainer.max_steps=6", "--task.warmup_steps=2"]
    steps += ["--task.schedule=inverse_sqrt", "--model.dropout=0.1", "--trainer.ema_decay=0.9"]
    steps += ["--model.mixing=linear", "--model.num_features=8", "--task.redraw_every=2"]
    whole, half = tmp_path / "whole", tmp_path / "half"
    assert main(words(folder, whole, *steps)) == 0
    given = [word for word in words(folder, half, *steps) if "pieces" not in word]
    assert main([*given, f"--data.tokenizer={whole}", "--trainer.max_steps=3"]) == 0
    assert main(["train", "--resume", str(half), "--trainer.max_steps=6"]) == 0
    one, two = (last_state(path)["state_dict"] for path in (whole, half))
    assert differences(one, two) == []


def test_bleu_ignores_case_if_the_tokenizer_does(tmp_path, monkeypatch):
    """Even if no option of the run says so."""
    lines = ["The Cat sat on Anna's Mat in Berlin.", "A Dog met Peter in the Park."] * 3
    for name in ("v.de", "v.en"):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    for lowercase in (True, False):
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
    config["data"]["test"] = tmp_path / "gone"
    monkeypatch.setattr(translation, "translate", lambda *_: pytest.fail("evaluated too early"))
    with pytest.raises(FileNotFoundError, match="gone.de"):
        translation.evaluate(tmp_path, model, config, tmp_path)


def test_conversion_of_a_trained_model(run, folder, capsys):
    """Few random features lose nearly all of the BLEU score, many keep much of it (fig. 2)."""
    script = load_script("conversion")
    assert script.main([str(run), "--features", "4", "512", "--draws", "2", "--beam", "1"]) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "|" in line][2:]
    found = {row[1].strip(): float(row[2].split("±")[0]) for row in rows}
    whole, few, many = (found[key] for key in ("softmax, as trained", "4 features", "512 features"))
    assert len(found) == 3 and few < 0.3 * whole and many > 3 * few
