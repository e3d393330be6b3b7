import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from recipe_runs import data_of, evaluated, trained
from tiny_run import results_of

import molflt
from molflt.data.text.datamodule import read_pieces
from molflt.data.text.sources import _records
from molflt.data.text.tokenizer import Tokenizer, find_tokenizer
from molflt.data.text.vocabulary import AMINO_ACIDS, RESIDUES, Vocabulary
from molflt.evaluation.language import _blosum, correlation, draw_substitutions
from molflt.sequence.heads import _PlainHead
from molflt.tasks.masked import Draws, MaskedTask
from molflt.training.checkpoint import load_run

pytest.importorskip("tokenizers")
CAUSAL, MASKED = "causal proteins", "masked proteins"


def counted(name: str, use: str) -> Counter[str]:
    records = _records(str(data_of(name) / f"{use}.fasta"))
    return Counter(letter for record in records for letter in record.residues)


def test_ends_of_records_do_not_count() -> None:
    """Perplexity is computed in the blocks of training; the baseline also predicts ends."""
    run, results = trained(CAUSAL), evaluated(CAUSAL)
    train, val = counted(CAUSAL, "train"), counted(CAUSAL, "val")
    total = train.total() + 120 + 26
    nats = -sum(n * math.log((train[x] + 1) / total) for x, n in val.items()) / val.total()
    assert results["val"]["unigram_perplexity"] == pytest.approx(math.exp(nats), rel=1e-12)
    assert results["val"]["residues"] == val.total()
    share = 100 * val[max(train, key=train.__getitem__)] / val.total()
    assert results["val"]["unigram_accuracy_percent"] == pytest.approx(share, rel=1e-12)
    model, _ = load_run(run)
    vocabulary = Vocabulary.from_json((run / "vocabulary.json").read_bytes())
    records = _records(str(data_of(CAUSAL) / "test.fasta"))
    ids = vocabulary.encode("".join(f"{one.residues}\n" for one in records))
    stream, scores = torch.cat((torch.tensor([vocabulary.eos]), ids)), []
    for start in range(0, len(ids), 31):
        piece = stream[start : start + 32][None]
        with torch.no_grad():
            log_p = model.log_probabilities(model(piece[:, :-1]))[0]
        for row, wanted in zip(log_p, piece[0, 1:], strict=True):
            if wanted != vocabulary.eos:
                scores.append((float(row[wanted]), int(row.argmax()) == int(wanted)))
    nats, right = np.array(scores).T
    result = results["test"]
    assert result["residues"] == len(nats)
    assert result["residue_perplexity"] == pytest.approx(math.exp(-nats.mean()), rel=1e-5)
    assert result["residue_accuracy_percent"] == pytest.approx(100 * right.mean())
    text = molflt.load(run).generate("mkvlawgd", tokens=3, temperature=0)
    assert text.startswith("MKVLAWGD") and set(text) <= {*RESIDUES, "\n"}


def test_judged_residues_are_always_masked(tmp_path) -> None:
    """The unigram baseline is omitted if the training data are missing."""
    run, results = trained(MASKED), evaluated(MASKED)
    model, _ = load_run(run)
    tokenizer = Tokenizer.from_json(*find_tokenizer(run))
    blocks = read_pieces(str(data_of(MASKED) / "val.fasta"), tokenizer, 33)
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
    train = counted(MASKED, "train")
    counts = torch.tensor([0.0] * 5 + [train[x] + 1.0 for x in RESIDUES], dtype=torch.float64)
    expected = (-(counts / counts.sum()).log()[wanted].mean()).exp().item()
    assert results["val"]["unigram_perplexity"] == pytest.approx(expected, rel=1e-12)
    file = data_of(MASKED) / "train.fasta"
    moved = file.rename(file.with_suffix(".moved"))
    try:
        result = results_of(run, "--splits=[val]", out=tmp_path)["val"]
    finally:
        moved.rename(file)
    assert "unigram_perplexity" not in result and result["residues"] == len(wanted)
    (best,) = molflt.load(run).fill("MKVLAWGDERMKVL[MASK]WGDERMKVLAWGDER", count=2)
    assert best[0].probability > best[1].probability and best[0].name in RESIDUES
    short = tmp_path / "short.fasta"
    short.write_text(">a\nM\n")
    rare = MaskedTask(model, mask_rate=0.01)
    with pytest.raises(ValueError, match="short"):  # its perplexity would be 1, the best value
        rare.expect_gaps(read_pieces(str(short), tokenizer, 33), "short")


def test_blosum62_embeddings_correlate_with_blosum62(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("Bio")
    table = _blosum()
    assert table is not None and table.shape == (20, 20) and (table == table.T).all()
    # diagonal entries of C (first) and W (last), and their common entry (Henikoff and Henikoff,
    # 1992)
    assert (table[0, 0], table[-1, -1], table[0, -1]) == (9, 11, -2)
    centered = np.eye(20) - 1 / 20
    values, vectors = np.linalg.eigh(centered @ table @ centered)
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
