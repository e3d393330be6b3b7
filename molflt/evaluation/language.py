"""Evaluation of causal and masked language models, and of sentence classifiers."""

import importlib.util
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from molflt import plots
from molflt.data.text.datamodule import PieceBlocks, TokenBlocks, read_blocks, read_pieces
from molflt.data.text.sentences import (
    CLASSES,
    GLUE,
    TASKS,
    Example,
    Sentences,
    padded,
    read_examples,
    read_splits,
)
from molflt.data.text.tokenizer import Tokenizer, find_tokenizer
from molflt.data.text.vocabulary import Vocabulary
from molflt.evaluation import common
from molflt.evaluation.results import Evaluation, Results, results_table, write_csv
from molflt.files import warn
from molflt.optional import require
from molflt.sequence.encoder import MaskedLanguageModel, SequenceClassifier
from molflt.sequence.heads import Head
from molflt.sequence.language_model import LanguageModel
from molflt.tasks.language import LanguageTask
from molflt.tasks.masked import MaskedTask
from molflt.training.config import Config

_SHOWN = 128  # tokens in the figure of attention matrices
_OF_GAPS = ("perplexity", "accuracy_percent", "next_sentence_percent", "gaps")
_ORDER = "CSTPAGNDEQHRKMILVFYW"  # similar amino acids are adjacent, as in the tables of Dayhoff
_OF_RESIDUES = (
    "residue_perplexity", "residue_accuracy_percent", "unigram_perplexity",
    "unigram_accuracy_percent", "residues",
)  # fmt: skip
_NOTE = "10 %: attention to this share of preceding tokens; mean over heads and layers, first block"


def evaluate(
    run: Path, model: LanguageModel, config: Config, out: Path, batch_size: int = 64, **which: Any
) -> Evaluation:
    """Evaluates a language model: the perplexity per token of each text.

    Each block has the length used in training and is evaluated without the preceding text, as in
    the literature. Writes losses.png (loss against the position in the block), attention.png (each
    head of the last layer, for the first tokens) and, with a relative encoding, encoding.png. For
    protein models, also compares the per-residue metrics with those of a unigram model fitted to
    the training file, and writes substitutions.png.

    Args:
        batch_size: number of blocks per batch.
        which: see `molflt.evaluation.common.named_sources`.

    Returns:
        Per split: perplexity, bits_per_token, tokens, nearest and farthest. The last two are the
        attention to the nearest and farthest 10 % of the tokens of the first block, averaged over
        heads and layers. For proteins, also residue_perplexity, residue_accuracy_percent, residues
        (the number of residues, without ends of records), unigram_perplexity and
        unigram_accuracy_percent.
    """
    file, length = run / "vocabulary.json", config["data"]["length"]
    vocabulary = Vocabulary.from_json(file.read_bytes(), str(file))
    read = partial(read_blocks, vocabulary=vocabulary, length=length)
    residues = None
    if vocabulary.level == "protein":  # the unigram model also predicts ends of records
        possible = np.ones(len(vocabulary), dtype=bool)
        residues = Residues(config["data"]["train"], read, possible, vocabulary.ids)
    sources = common.named_sources(config["data"], **which)
    texts = {split: read(source) for split, source in sources.items()}  # fails before evaluation
    results: Results = {}
    curves: dict[str, NDArray[np.float64]] = {}
    for split, blocks in texts.items():
        curves[split], correct = token_losses(
            model, blocks, batch_size, split, predict=residues is not None
        )
        is_token = np.isfinite(curves[split])
        losses = curves[split][is_token]
        tokens, targets = blocks[0]
        tokens = tokens[targets >= 0].to(common.device_of(model))[None]
        positions = torch.arange(tokens.shape[1])
        distances = (positions[:, None] - positions).abs()
        shares = common.locality_of(model.stack, partial(model, tokens), distances, causal=True)
        results[split] = {**metrics_of(losses), "tokens": len(losses), **shares}
        if residues is not None:
            is_residue = blocks.ids != blocks.eos
            accuracy = 100 * float(correct[is_token][is_residue].mean())
            perplexity = metrics_of(losses[is_residue])["perplexity"]
            results[split] |= residues.metrics(perplexity, accuracy, blocks.ids[is_residue])
    plots.losses_by_place(curves, out / "losses.png")
    first = tokens[:, :_SHOWN]  # of the last split
    title = f"last layer, first {first.shape[1]} tokens of {split}"
    common.draw_stack(out, model.stack, lambda: model(first), title, model.position_scale, length)
    text = f"{results_table('text', results)}\n\n{_NOTE}"
    if residues is not None:
        text += residues.report(results, model.head, out / "substitutions.png")
    return Evaluation(results, f", blocks of {length} tokens\n\n{text}\n")


def metrics_of(losses: NDArray[np.float64]) -> dict[str, float]:
    """Computes perplexity and bits per token from the negative log-likelihoods in nats."""
    return LanguageTask.sums(torch.tensor(losses.sum()), torch.tensor(len(losses))).metrics()


def token_losses(
    model: LanguageModel, blocks: TokenBlocks, batch_size: int, name: str, predict: bool
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Returns the negative log-likelihood of each token in nats, and a mask of correct predictions.

    Both have the shape (blocks, length); losses of padding are NaN. Without `predict`, the mask is
    empty, and logits are not kept in memory.
    """
    losses, correct = [], [np.empty((0, blocks.length), dtype=bool)]
    batch = f"{batch_size} x {blocks.length:,} tokens"
    with common.batches(DataLoader(blocks, batch_size), model, name, batch) as loaded:
        for inputs, targets in loaded:
            if predict:
                log_p = model.log_probabilities(model(inputs))  # [block, position, id]
                score = log_p.gather(2, targets.clamp(min=0)[..., None])[..., 0]
                correct.append((log_p.argmax(dim=2) == targets).cpu().numpy())
            else:
                score = model.log_likelihood(inputs, targets)
            loss = -score.double()
            common.expect_finite(name, loss)
            losses.append(loss.masked_fill(targets < 0, torch.nan).cpu().numpy())
    return np.concatenate(losses), np.concatenate(correct)


def evaluate_masked(
    run: Path,
    model: MaskedLanguageModel,
    config: Config,
    out: Path,
    batch_size: int | None = None,
    **which: Any,
) -> Evaluation:
    """Evaluates a masked language model: perplexity and accuracy of masked tokens (gaps).

    The gaps are the same as in validation and depend only on the sequence. Writes attention.png
    (each head of the last attention layer) and, with a relative encoding, encoding.png. For protein
    models, also compares the per-residue metrics with those of a unigram model fitted to the
    training file, and writes substitutions.png.

    Args:
        batch_size: number of sequences per batch, within which second parts are exchanged; defaults
            to the value used in training.
        which: see `molflt.evaluation.common.named_sources`.

    Returns:
        Per split: perplexity, accuracy_percent, next_sentence_percent if the model predicts it (of
        batches of several sequences), and gaps (the number of gaps). For proteins, also
        residue_perplexity and residue_accuracy_percent, computed with the mask token in every gap;
        residues (the number of gaps); and unigram_perplexity and unigram_accuracy_percent.
    """
    tokenizer, options = Tokenizer.from_json(*find_tokenizer(run)), config["data"]
    read = partial(read_pieces, tokenizer=tokenizer, length=options["length"])
    shares = {name: config["task"][name] for name in ("mask_rate", "mask_share", "random_share")}
    task = MaskedTask(model, **shares)
    # In training, a tenth of the gaps show the correct token.
    hides_all = MaskedTask(model, shares["mask_rate"], mask_share=1.0, random_share=0.0)
    size = options["batch_size"] if batch_size is None else batch_size
    residues = None
    if tokenizer.letters is not None:
        possible = model.ordinary.cpu().numpy()
        residues = Residues(options["train"], read, possible, tokenizer.letters)
    texts = {}  # all texts are read before the first is evaluated
    for split, source in common.named_sources(options, **which).items():
        texts[split] = read(source, pairs=model.next_sentence is not None)
        task.expect_gaps(texts[split], source)
    results: Results = {}
    for split, blocks in texts.items():
        loader, batch = DataLoader(blocks, size), f"{size} x {blocks.length:,} tokens"
        total = common.total_of(task, loader, split, batch)
        results[split] = {**task.summarize(total), "gaps": int(total[2])}
        if residues is not None:
            scores = hides_all.summarize(common.total_of(hides_all, loader, split, batch))
            with common.batches(loader, model, split, batch) as loaded:
                ids = np.concatenate([hides_all.hidden_ids(each).cpu().numpy() for each in loaded])
            perplexity, accuracy = scores["perplexity"], scores["accuracy_percent"]
            results[split] |= residues.metrics(perplexity, accuracy, ids)
    tokens, types, key_mask = (part[None] for part in blocks[0])  # of the last split
    count = min(_SHOWN, int(key_mask.sum()))
    first = [part[:, :count].to(common.device_of(model)) for part in (tokens, types)]
    stack, scale = model.encoder.stack, model.encoder.position_scale
    title = f"last layer with attention, first {count} tokens of {split}"
    common.draw_stack(out, stack, lambda: model(*first), title, scale, blocks.length)
    text = results_table("text", results, _OF_GAPS)
    if residues is not None:
        text += residues.report(results, model.head, out / "substitutions.png")
    return Evaluation(results, f"\n\n{text}\n")


class Residues:
    """Per-residue metrics of the model and, if the training file exists, of a unigram model.

    The unigram model predicts id i with probability (n_i + 1) / (n + m), where m is the number of
    possible ids, and n_i and n are the counts of id i and of all possible ids in the training file,
    `source`, which `read` reads. `possible` is a mask (ids,) of the possible ids. `id_of` maps
    letters of residues to ids.
    """

    def __init__(
        self,
        source: str,
        read: Callable[[str], TokenBlocks | PieceBlocks],
        possible: NDArray[np.bool_],
        id_of: Mapping[str, int],
    ) -> None:
        self._id_of = id_of
        self._counts: NDArray[np.float64] | None = None
        self._note = f"no unigram model, because the training file {source} is missing"
        if Path(source).is_file():
            counts = np.bincount(read(source).ids, minlength=len(possible)).astype(np.float64)
            self._counts = np.where(possible, counts + 1, 0)
            self._note = f"unigram: frequencies in {source}"

    def metrics(
        self, perplexity: float | None, accuracy: float | None, targets: NDArray[np.integer]
    ) -> dict[str, float | None]:
        """Returns the metrics of the model and the unigram model; `targets` are ids of residues."""
        metrics: dict[str, float | None] = {
            "residue_perplexity": perplexity,
            "residue_accuracy_percent": accuracy,
            "residues": len(targets),
        }
        if (counts := self._counts) is not None:
            nats = -np.log(counts[targets] / counts.sum())
            metrics["unigram_perplexity"] = math.exp(nats.mean())
            metrics["unigram_accuracy_percent"] = 100 * float((targets == counts.argmax()).mean())
        return metrics

    def report(self, results: Results, head: Head, png: Path) -> str:
        """Draws the similarities of amino acids and returns a table of metrics with notes."""
        table = results_table("per residue", results, _OF_RESIDUES)
        return f"\n\n{table}\n\n{self._note}\n{draw_substitutions(head, self._id_of, png)}"


def draw_substitutions(head: Head, ids: Mapping[str, int], png: Path) -> str:
    """Draws the similarity of the output embeddings of amino acids next to BLOSUM62.

    The similarity is the cosine between embeddings after their mean is subtracted, much as in the
    appendix of Performer (arXiv:2009.14794). Without Biopython, which provides BLOSUM62, only the
    learned table is drawn. Returns a line with the correlation between the tables.
    """
    residues = torch.tensor([ids[letter] for letter in _ORDER], device=common.device_of(head))
    with torch.inference_mode():
        vectors = head.embed(residues).double().cpu()
        unit = torch.nn.functional.normalize(vectors - vectors.mean(dim=0))
    table = (unit @ unit.T).numpy()
    tables, blosum = {"cosine of output embeddings": table}, _blosum()
    if blosum is None:
        note = f"{png.name}: without BLOSUM62, which needs Biopython: pip install biopython"
    else:
        r = correlation(table, blosum)
        tables["BLOSUM62"] = blosum
        note = f"{png.name}: correlation with BLOSUM62 over 190 pairs of amino acids: {r:.3f}"
    plots.substitutions(tables, _ORDER, png)
    return note


def correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Computes the Pearson correlation of two symmetric tables, excluding their diagonals."""
    above = np.triu_indices(len(one), 1)
    return float(np.corrcoef(one[above], other[above])[0, 1])


def _blosum() -> NDArray[np.float64] | None:
    """Returns BLOSUM62, with rows in the order of the figure; None without Biopython."""
    if importlib.util.find_spec("Bio") is None:
        return None
    from Bio.Align import substitution_matrices

    return np.array(substitution_matrices.load("BLOSUM62").select(_ORDER))


def evaluate_sentences(
    run: Path,
    model: SequenceClassifier,
    config: Config,
    out: Path,
    splits: list[str] | None = None,
    data: Path | None = None,
    batch_size: int = 64,
) -> Evaluation:
    """Evaluates a sentence classifier with the metrics of its task, as in GLUE.

    The metrics are accuracy, F1, and the Matthews, Pearson and Spearman correlations. Writes
    predictions.csv.

    Args:
        splits: any of train, val, test and, for MNLI, val_mismatched; by default the val splits.
        data: a different file of the task to evaluate.
        batch_size: number of sentences or pairs per batch.

    Returns:
        For each split, the metrics of the task in percent and n, the number of items. For GLUE
        tasks, also glue_percent, the mean of these metrics, which enters the GLUE average.
    """
    task, length = config["data"]["task"], config["data"]["length"]
    tokenizer = Tokenizer.from_json(*find_tokenizer(run))
    classes = json.loads((run / CLASSES).read_bytes())
    results: Results = {}
    rows: list[dict[str, object]] = []
    known = ["train", "val", "test"] + (["val_mismatched"] if task == "MNLI" else [])
    usual = [name for name in known if name.startswith("val")]
    chosen = common.chosen_splits(known, splits, usual, data)
    if data is None:
        root, fraction = Path(config["data"]["root"]), config["data"].get("val_fraction")
        read = read_splits(root, task, chosen, fraction, classes)
        texts = {name: examples for name, (_, examples) in read.items()}
    else:
        texts = {Path(data).name: read_examples(Path(data), task, classes)}
    for split, examples in texts.items():
        logits = text_logits(model, tokenizer, examples, length, batch_size, split)
        labels = np.array([example.label for example in examples])
        predicted = logits[:, 0] if model.classes == 1 else logits.argmax(axis=1).astype(float)
        results[split] = {**official(task, predicted, labels), "n": len(labels)}
        for i in range(len(labels)):
            row: dict[str, Any] = {"label": labels[i], "predicted": predicted[i]}
            if model.classes > 1:
                row = {name: classes[int(index)] for name, index in row.items()}
            rows.append({"split": split, "index": i, **row})
    write_csv(out / "predictions.csv", rows)
    table = results_table("sentences", results)
    return Evaluation(results, f", {task}\n\n{table}\n")


def official(
    task: str, predicted: NDArray[np.float64], label: NDArray[np.float64]
) -> dict[str, float | None]:
    """Computes the metrics of a task in percent and, for GLUE tasks, their mean, glue_percent.

    Args:
        task: key of `molflt.data.text.sentences.TASKS`.
        predicted: (items,), predicted classes (indices) or scores.
        label: (items,), true classes or scores.
    """
    from scipy import stats

    metrics = require("sklearn.metrics", "GLUE", "text")
    known: dict[str, Callable[..., Any]] = {
        "accuracy": metrics.accuracy_score,
        "f1": metrics.f1_score,
        "matthews": metrics.matthews_corrcoef,
        "pearson": lambda y, x: stats.pearsonr(x, y)[0] if len(x) > 1 else np.nan,
        "spearman": lambda y, x: stats.spearmanr(x, y)[0],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for constant predictions
        values = [float(known[name](label, predicted)) for name in TASKS[task].metrics]
    # The undefined correlation of constant predictions counts as 0, as in Matthews' correlation.
    values = [100 * value if np.isfinite(value) else 0.0 for value in values]
    names = [f"{name}_percent" for name in TASKS[task].metrics]
    scores: dict[str, float | None] = dict(zip(names, values, strict=True))
    return {**scores, "glue_percent": float(np.mean(values))} if task in GLUE else scores


def text_logits(
    model: SequenceClassifier,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    length: int,
    batch_size: int,
    name: str,
) -> NDArray[np.float64]:
    """Returns the logits (items, classes) of sentences or sentence pairs.

    Inputs of more than `length` tokens are truncated, as in training, with a warning.
    """
    rows = Sentences(examples, tokenizer, length, name)
    if rows.cut:
        warn(f"{name}: {rows.cut:,} of {len(rows):,} exceed {length} tokens and were truncated")
    loader = DataLoader(rows, batch_size, collate_fn=partial(padded, pad=tokenizer.pad))
    return common.logits_of(model, loader, name, f"{batch_size} x {length:,} tokens")[0].numpy()
