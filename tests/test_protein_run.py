"""Masked and causal models of proteins: runs, the unigram baseline, and learned similarities."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_run import logged, page_of

import molflt
from molflt.commands.cli import main
from molflt.data.text.sources import _records
from molflt.data.text.tokenized import read_pieces
from molflt.data.text.vocabulary import AMINO_ACIDS, RESIDUES
from molflt.evaluation.common import load_tokenizer, load_vocabulary
from molflt.evaluation.language import Residues, _blosum, correlation, draw_substitutions
from molflt.sequence.heads import _PlainHead
from molflt.tasks.masked import Draws
from molflt.training.checkpoint import load_run

pytest.importorskip("tokenizers")
SIZE = ["--model.dim=32", "--model.heads=2", "--model.layers=1", "--model.ffn_dim=16"]
LENGTHS = {"language": 31, "masked_language": 33}  # a record with special tokens
STEPS = ["--trainer.accelerator=cpu", "--task.warmup_steps=5", "--trainer.log_every=20"]
KINDS = {"language": "level", "masked_language": "kind"}
FAMILIES = ("MKVL", "AWGD", "ERST")


def write_proteins(path: Path, records: int, seed: int) -> None:
    """Writes records of one family of four residues each, which can be inferred from the others."""
    draw = np.random.default_rng(seed)
    with open(path, "w") as file:
        for i in range(records):
            family = FAMILIES[draw.integers(3)]
            letters = draw.choice(list(family), 30)
            file.write(f">r{i}\n{''.join(letters)}\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("proteins")
    for seed, (name, count) in enumerate({"train": 120, "val": 30, "test": 9}.items()):
        write_proteins(root / f"{name}.fasta", count, seed)
    return root


@pytest.fixture(scope="module", params=KINDS)
def run(request, folder, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("runs") / request.param
    files = [f"--data.{name}={folder / name}.fasta" for name in ("train", "val", "test")]
    own = [f"--recipe={request.param}", f"--data.{KINDS[request.param]}=protein"]
    kernel = ["--model.feature_map=sigmoid", "--model.max_length=33", "--data.batch_size=16"]
    sizes = [f"--data.length={LENGTHS[request.param]}", "--task.lr=1e-2"]
    sizes += ["--task.mask_rate=0.3"] * (request.param == "masked_language")
    count = ["--trainer.max_steps=60", "--trainer.val_every=30", f"--run={path}"]
    assert main(["train", *own, *files, *SIZE, *kernel, *sizes, *STEPS, *count]) == 0
    return path


@pytest.fixture(scope="module")
def results(run) -> dict[str, dict[str, float]]:
    assert main(["evaluate", str(run)]) == 0
    found = json.loads((run / "results.json").read_text())
    assert list(found) == ["val", "test"]
    return found


def test_a_run_beats_the_unigram_baseline(run, results, folder):
    causal = run.name == "language"
    for found in results.values():
        assert found["residue_perplexity"] < 0.8 * found["unigram_perplexity"]
        assert found["residue_accuracy_percent"] > 1.5 * found["unigram_accuracy_percent"]
    train = Counter(x for record in _records(str(folder / "train.fasta")) for x in record.residues)
    ends = 120 if causal else 0
    total = train.total() + ends + 25 + causal
    val = Counter(x for record in _records(str(folder / "val.fasta")) for x in record.residues)
    if causal:  # masked models count masked residues only
        nats = -sum(n * math.log((train[x] + 1) / total) for x, n in val.items()) / val.total()
        assert results["val"]["unigram_perplexity"] == pytest.approx(math.exp(nats), rel=1e-12)
        assert results["val"]["residues"] == val.total()
        best = max(train, key=train.__getitem__)
        share = 100 * val[best] / val.total()
        assert results["val"]["unigram_accuracy_percent"] == pytest.approx(share, rel=1e-12)
    page = page_of(run)
    heading = "perplexity ↓" if causal else "perplexity in"
    assert "What is missing" not in page and heading in page
    assert (run / "substitutions.png").stat().st_size > 1000
    validated = min(logged(run, "val_perplexity"))
    assert results["val"]["perplexity"] == pytest.approx(validated, rel=1e-5)


def test_ends_of_records_do_not_count(run, results, folder):
    """Token by token, in the blocks of training."""
    if run.name != "language":
        pytest.skip("the task judges masked residues, see test_masked_run")
    result = results["test"]
    model, _ = load_run(run)
    vocabulary = load_vocabulary(run, 26)
    text = "".join(f"{one.residues}\n" for one in _records(str(folder / "test.fasta")))
    ids = vocabulary.encode(text)
    stream, scores = torch.cat((torch.tensor([vocabulary.eos]), ids)), []
    for start in range(0, len(ids), 31):
        piece = stream[start : start + 32][None]
        with torch.no_grad():
            log_p = model.log_probabilities(model(piece[:, :-1]))[0]
        for row, wanted in zip(log_p, piece[0, 1:], strict=True):
            if wanted != vocabulary.eos:
                scores.append((float(row[wanted]), int(row.argmax()) == int(wanted)))
    nats, right = np.array(scores).T
    assert result["residues"] == len(nats)
    assert result["residue_perplexity"] == pytest.approx(math.exp(-nats.mean()), rel=1e-5)
    assert result["residue_accuracy_percent"] == pytest.approx(100 * right.mean())


def test_judged_residues_are_always_masked(run, results, folder, tmp_path):
    """The unigram baseline is left out if the training data are missing."""
    if run.name == "language":
        pytest.skip("only masked models")
    model, _ = load_run(run)
    tokenizer = load_tokenizer(run, model.vocabulary)
    blocks = read_pieces(str(folder / "val.fasta"), tokenizer, 33)
    batch = [torch.stack(parts) for parts in zip(*blocks, strict=True)]
    draws = Draws.of_content(batch[0], batch[2]).tokens
    told = batch[2] & model.ordinary[batch[0]] & (draws[0] < 0.3)
    seen = batch[0].masked_fill(told, tokenizer.mask)
    with torch.no_grad():
        log_p = model.log_probabilities(model(seen, batch[1], batch[2]))[told]
    wanted = batch[0][told]
    nats = -log_p.gather(1, wanted[:, None]).double().mean()
    assert results["val"]["residues"] == len(wanted) == results["val"]["gaps"]
    assert results["val"]["residue_perplexity"] == pytest.approx(nats.exp().item(), rel=1e-5)
    right = (log_p.argmax(1) == wanted).double().mean().item()
    assert results["val"]["residue_accuracy_percent"] == pytest.approx(100 * right)

    train = Counter(x for record in _records(str(folder / "train.fasta")) for x in record.residues)
    counts = torch.tensor([0.0] * 5 + [train[x] + 1.0 for x in RESIDUES], dtype=torch.float64)
    expected = (-(counts / counts.sum()).log()[wanted].mean()).exp().item()
    assert results["val"]["unigram_perplexity"] == pytest.approx(expected, rel=1e-12)
    moved = folder / "train.moved"
    (folder / "train.fasta").rename(moved)
    try:
        assert main(["evaluate", str(run), "--splits=[val]", "--out", str(tmp_path)]) == 0
    finally:
        moved.rename(folder / "train.fasta")
    result = json.loads((tmp_path / "results.json").read_text())["val"]
    assert "unigram_perplexity" not in result and result["residues"] == len(wanted)


def test_loaded_models_predict_residues(run):
    trained = molflt.load(run)
    if run.name == "language":
        text = trained.generate("mkvlawgd", tokens=3, temperature=0)
        assert text.startswith("MKVLAWGD") and set(text) <= {*RESIDUES, "\n"}
    else:
        (found,) = trained.fill("MKVLAWGDERMKVL[MASK]WGDERMKVLAWGDER", count=2)
        assert found[0].probability > found[1].probability and found[0].name in RESIDUES


def test_the_baseline_is_a_distribution_over_possible_tokens():
    possible = np.array([False, True, True, True])
    found = Residues(__file__, lambda: np.array([0, 0, 0, 2, 2, 1]), possible)
    judged = found.judge(None, None, np.array([2, 2, 3]))
    assert judged["unigram_perplexity"] == pytest.approx((4 * 6) ** (1 / 3), rel=1e-15)
    assert judged["unigram_accuracy_percent"] == pytest.approx(200 / 3, rel=1e-15)


def test_blosum62_embeddings_correlate_with_blosum62(tmp_path, monkeypatch):
    pytest.importorskip("Bio")
    table = _blosum()
    assert table is not None and table.shape == (20, 20) and (table == table.T).all()
    # C is first and W last: 9 and 11 on the diagonal, -2 between them (Henikoff and Henikoff, 1992)
    assert (table[0, 0], table[-1, -1], table[0, -1]) == (9, 11, -2)
    centered = np.eye(20) - 1 / 20
    rising = centered @ table @ centered
    values, vectors = np.linalg.eigh(rising)
    head = _PlainHead(20, 26)
    ids = {letter: place for place, letter in enumerate(RESIDUES)}
    order = "CSTPAGNDEQHRKMILVFYW"
    assert sorted(order) == sorted(AMINO_ACIDS)
    with torch.no_grad():
        rows = torch.tensor(vectors * values.clip(0) ** 0.5, dtype=torch.float32)
        head.weight[[ids[letter] for letter in order]] = rows
    note = draw_substitutions(head, ids, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert float(note.rsplit(maxsplit=1)[1]) > 0.8
    both = np.random.default_rng(0).normal(size=(2, 20, 20))
    both += both.transpose(0, 2, 1)
    expected = np.corrcoef(*(t[np.tril_indices(20, -1)] for t in both))[0, 1]
    assert correlation(*both) == pytest.approx(expected, rel=1e-12)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "biopython" in draw_substitutions(head, ids, tmp_path / "b.png").lower()
