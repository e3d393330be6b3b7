"""Evaluation of a classifier of sequences: the official metrics of GLUE, accuracy elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from tqdm import tqdm

from molflt.data.text.glue import GLUE, TASKS, Example, read_examples, read_splits
from molflt.data.text.sentences import Sentences, padded
from molflt.data.text.tokenizer import Tokenizer
from molflt.evaluation.images import classes_of
from molflt.evaluation.masked import load_tokenizer
from molflt.evaluation.report import Report, _warn, align, write_csv
from molflt.evaluation.results import begin_results
from molflt.memory import within_memory
from molflt.sequence.classifier import SequenceClassifier
from molflt.training.config import Config

__all__ = ["evaluate", "logits_of", "official"]

_Numbers = NDArray[np.float64]


def evaluate(
    run: Path,
    model: SequenceClassifier,
    config: Config,
    out: Path,
    splits: list[str] | None = None,
    data: Path | None = None,
    batch_size: int = 64,
) -> Report:
    """Evaluates a classifier of sentences: accuracy, F1, Matthews, Pearson or Spearman, as GLUE.

    Writes predictions.csv.

    Args:
        run: folder of the training run.
        model: in evaluation mode.
        config: the run's.
        out: folder to write.
        splits: some of train, val, test, and val_mismatched of MNLI; by default those of val.
        data: another file of the task instead.
        batch_size: sentences or pairs in a batch.

    Returns:
        Per split: the metrics of the task in percent, of those of GLUE glue_percent (their mean,
        what the task adds to its average), and n.

    Raises:
        FileNotFoundError: if a file is missing.
        ModuleNotFoundError: without scikit-learn.
        ValueError: if a file cannot be used, or has other labels than the task.
    """
    task, length = str(config["data"]["task"]), int(str(config["data"]["length"]))
    tokenizer = load_tokenizer(run, model.vocabulary)
    classes = classes_of((run / "classes.json").read_bytes(), f"{run}/classes.json", model.classes)
    results: dict[str, dict[str, float | None]] = {}
    rows: list[dict[str, object]] = []
    for split, examples in _examples(config, task, splits, data, classes).items():
        logits = logits_of(model, tokenizer, examples, length, batch_size, split)
        told = logits[:, 0] if model.classes == 1 else logits.argmax(axis=1).astype(float)
        label = np.array([one.label for one in examples])
        results[split] = {**official(task, told, label), "n": len(label)}
        rows += _rows(split, told, label, None if model.classes == 1 else classes)
    begin_results(out, "predictions.csv")
    files = [write_csv(out / "predictions.csv", rows)]
    return Report(results, f", {task}\n\n{_table(results)}\n", files)


def official(task: str, told: _Numbers, label: _Numbers) -> dict[str, float | None]:
    """The metrics of a task, in percent, and of those of GLUE their mean as glue_percent.

    Args:
        task: key of `molflt.data.text.glue.TASKS`.
        told: predicted indices of classes, or scores, (items,).
        label: the right ones, (items,).
    """
    try:
        from sklearn import metrics
    except ImportError:
        raise ModuleNotFoundError(
            "the metrics of GLUE need the package scikit-learn; got none; run: pip install "
            "molflt[text]"
        ) from None
    from scipy import stats

    known: dict[str, Callable[..., Any]] = {
        "accuracy": metrics.accuracy_score,
        "f1": metrics.f1_score,
        "matthews": metrics.matthews_corrcoef,
        "pearson": lambda y, x: stats.pearsonr(x, y)[0],
        "spearman": lambda y, x: stats.spearmanr(x, y)[0],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of predictions that are all the same
        values = [float(known[name](label, told)) for name in TASKS[task].metrics]
    # no number then; 0, as for Matthews
    values = [100 * value if np.isfinite(value) else 0.0 for value in values]
    names = [f"{name}_percent" for name in TASKS[task].metrics]
    found: dict[str, float | None] = dict(zip(names, values, strict=True))
    return {**found, "glue_percent": float(np.mean(values))} if task in GLUE else found


def logits_of(
    model: SequenceClassifier,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    length: int,
    batch_size: int,
    name: str,
) -> _Numbers:
    """Logits (items, classes) of sentences or pairs.

    Args:
        model: in evaluation mode.
        tokenizer: of the model.
        examples: whose labels are not looked at.
        length: most tokens, as in training.
        batch_size: sentences or pairs in a batch.
        name: of the examples, for messages.
    """
    device = next(model.parameters()).device
    found = []
    rows = Sentences(examples, tokenizer, length, name)
    if rows.cut:
        _warn(f"{name}: {rows.cut:,} of {len(rows):,} have more than {length} tokens, and were cut")
    batches = DataLoader(
        rows,
        batch_size=batch_size,
        collate_fn=partial(padded, pad=tokenizer.pad),
    )
    batch_of = f"{name}: a batch of {batch_size} x {length:,} tokens"
    with torch.inference_mode(), within_memory(lambda: batch_of, "lower --batch-size"):
        for batch in tqdm(batches, desc=name, leave=False, disable=None):
            tokens, types, there = (part.to(device) for part in batch[:3])
            found.append(model(tokens, types, there).double().cpu().numpy())
    logits = np.concatenate(found)
    if not np.isfinite(logits).all():
        raise ValueError(f"{name}: a logit is not finite; expected numbers; use another checkpoint")
    return logits


def _examples(
    config: Config,
    task: str,
    splits: Sequence[str] | None,
    other: Path | None,
    classes: Sequence[str],
) -> dict[str, list[Example]]:
    if other is not None:
        if splits:
            raise ValueError("give either --splits or --data; got both")
        own = read_examples(Path(other), task, classes)
        return {Path(other).name: _expect_enough(Path(other), task, own)}
    there = ["train", "val", "test"] + (["val_mismatched"] if task == "MNLI" else [])
    wanted = list(dict.fromkeys(splits or [name for name in there if name.startswith("val")]))
    if unknown := [name for name in wanted if name not in there]:
        raise ValueError(f"{task} has no split {unknown[0]!r}; expected some of {', '.join(there)}")
    share = cast("float | None", config["data"].get("val_fraction"))
    found = read_splits(Path(str(config["data"]["root"])), task, wanted, share, classes)
    return {name: _expect_enough(path, task, rows) for name, (path, rows) in found.items()}


def _expect_enough(path: Path, task: str, examples: list[Example]) -> list[Example]:
    """The same, unless there is no correlation of so few."""
    if len(examples) < 2 and "pearson" in TASKS[task].metrics:
        raise ValueError(
            f"{path}: expected at least 2 rows, of which there is a correlation; got "
            f"{len(examples)}; use a longer file"
        )
    return examples


def _rows(
    split: str, told: _Numbers, label: _Numbers, classes: list[str] | None
) -> list[dict[str, object]]:
    def shown(value: float) -> object:
        return float(value) if classes is None else classes[int(value)]

    return [
        {"split": split, "index": i, "label": shown(right), "predicted": shown(mine)}
        for i, (mine, right) in enumerate(zip(told, label, strict=True))
    ]


def _table(results: Mapping[str, Mapping[str, float | None]]) -> str:
    keys = [key for key in next(iter(results.values())) if key not in ("n", "glue_percent")]
    head = ("sentences", "n", *(f"{key.removesuffix('_percent')} / %" for key in keys))
    rows = [
        (name, f"{row['n']:,}", *(f"{row[key]:.2f}" for key in keys))
        for name, row in results.items()
    ]
    return align([head, *rows])
