"""Evaluation of sentence classifiers: the metrics of GLUE, or accuracy for other tasks."""

import json
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader

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
from molflt.evaluation import common
from molflt.evaluation.results import Evaluation, Results, results_table, write_csv
from molflt.files import warn
from molflt.optional import require
from molflt.sequence.encoder import SequenceClassifier
from molflt.training.config import Config

_Array = NDArray[np.float64]


def evaluate(
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


def official(task: str, predicted: _Array, label: _Array) -> dict[str, float | None]:
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
) -> _Array:
    """Returns the logits (items, classes) of sentences or sentence pairs.

    Inputs of more than `length` tokens are truncated, as in training, with a warning.
    """
    rows = Sentences(examples, tokenizer, length, name)
    if rows.cut:
        warn(f"{name}: {rows.cut:,} of {len(rows):,} exceed {length} tokens and were truncated")
    loader = DataLoader(rows, batch_size, collate_fn=partial(padded, pad=tokenizer.pad))
    return common.logits_of(model, loader, name, f"{batch_size} x {length:,} tokens")[0].numpy()
