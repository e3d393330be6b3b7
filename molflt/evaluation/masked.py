"""Evaluation of masked language models: perplexity and accuracy of masked tokens, attention."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from molflt import plots
from molflt.data.text.tokenized import PieceBlocks, read_pieces
from molflt.evaluation.common import (
    attention_of,
    batches,
    device_of,
    draw_encoding,
    expect_finite,
    named_sources,
)
from molflt.evaluation.kept import load_tokenizer
from molflt.evaluation.output import Evaluation, Results, results_table
from molflt.evaluation.proteins import Unigram, draw_substitutions, residue_table, unigram_of
from molflt.evaluation.results import begin_results
from molflt.sequence.masked import MaskedLanguageModel
from molflt.tasks.masked import MaskedTask
from molflt.tasks.masking import Draws
from molflt.training.config import Config

__all__ = ["evaluate"]

_ATTENTION_TOKENS = 128  # in the picture of attention matrices
_COLUMNS = {
    "perplexity": ("perplexity", 2),
    "accuracy_percent": ("right / %", 2),
    "next_sentence_percent": ("pairs right / %", 2),
    "gaps": ("gaps", 0),
}


def evaluate(
    run: Path,
    model: MaskedLanguageModel,
    config: Config,
    out: Path,
    splits: list[str] | None = None,
    data: Path | None = None,
    batch_size: int | None = None,
) -> Evaluation:
    """Evaluates a masked language model: perplexity and accuracy of masked tokens (gaps).

    The gaps are those of validation: they depend only on the sequence, not on the batch. Writes
    attention.png (each head of the last layer with attention) and, with a relative encoding,
    encoding.png. Protein models are also compared with the unigram model of the training file, and
    get substitutions.png.

    Args:
        splits: some of train, val and test; by default val, and test if the run names it.
        data: another text to evaluate instead, a file or an hf: name.
        batch_size: sequences in a batch, which decides where wrong second parts come from; by
            default as in training.

    Returns:
        Per split: perplexity, accuracy_percent, next_sentence_percent if the model predicts it, and
        gaps, their number. For proteins also residue_perplexity, residue_accuracy_percent and
        residues, over gaps that show only the mask, unigram_perplexity and
        unigram_accuracy_percent.
    """
    tokenizer, options = load_tokenizer(run, model.vocabulary), config["data"]
    length, pairs = int(str(options["length"])), model.next_sentence is not None
    shares = {
        name: float(str(config["task"][name]))
        for name in ("mask_rate", "mask_share", "random_share")
    }
    task = MaskedTask(model, **shares)
    size = int(str(options["batch_size"])) if batch_size is None else batch_size
    results: Results = {}
    proteins, train = tokenizer.letters is not None, str(options["train"])
    baseline, note = None, ""
    if proteins:
        possible = model.ordinary.cpu().numpy()
        baseline, note = unigram_of(
            train, lambda: read_pieces(train, tokenizer, length, use="train").ids, possible
        )
    texts = {}  # read all of them before evaluating the first
    for split, source in named_sources(options, splits, data).items():
        texts[split] = read_pieces(source, tokenizer, length, pairs, split)
        task.expect_gaps(texts[split], source)
    for split, blocks in texts.items():
        results[split] = _judged(task, blocks, size, split)[0]
        if proteins:
            results[split] |= _per_residue(
                model, shares["mask_rate"], blocks, size, split, baseline
            )
    begin_results(out, "attention.png", "encoding.png", "substitutions.png")
    columns = {k: v for k, v in _COLUMNS.items() if all(k in row for row in results.values())}
    text, files = results_table("text", columns, results), _draw(out, model, blocks, split)
    if tokenizer.letters is not None:
        png, about = draw_substitutions(model.head, tokenizer.letters, out / "substitutions.png")
        files.append(png)
        text = f"{text}\n\n{residue_table(results)}\n\n{note}\n{about}"
    return Evaluation(results, f"\n\n{text}\n", files)


def _judged(
    task: MaskedTask, blocks: PieceBlocks, batch_size: int, name: str
) -> tuple[dict[str, float | None], NDArray[np.int64]]:
    """Returns the metrics of a text, and the masked tokens, (gaps,)."""
    device = device_of(task.model)
    total = torch.zeros(len(task.sums._fields), dtype=torch.float64)
    masked = []
    with batches(
        DataLoader(blocks, batch_size), name, f"{batch_size} x {blocks.length:,} tokens"
    ) as loaded:
        for batch in loaded:
            moved = cast("tuple[Tensor, Tensor, Tensor]", tuple(part.to(device) for part in batch))
            total += torch.stack(list(task.judge(moved))).cpu()
            targets = task.gaps(moved, Draws.of_content(moved[0], moved[2]))[1]
            masked.append(targets[targets >= 0].cpu().numpy())
    expect_finite(name, total)
    return {**task.summarize(total), "gaps": int(total[2])}, np.concatenate(masked)


def _per_residue(
    model: MaskedLanguageModel,
    rate: float,
    blocks: PieceBlocks,
    batch_size: int,
    name: str,
    baseline: Unigram | None,
) -> dict[str, float | None]:
    """Returns the metrics of gaps that show only the mask, and those of the baseline on them.

    In training, a tenth of the gaps shows the right token, which a model can copy.
    """
    task = MaskedTask(model, mask_rate=rate, mask_share=1.0, random_share=0.0)
    found, masked = _judged(task, blocks, batch_size, name)
    return {
        "residue_perplexity": found["perplexity"],
        "residue_accuracy_percent": found["accuracy_percent"],
        "residues": len(masked),
        **({} if baseline is None else baseline.judge(masked)),
    }


def _draw(out: Path, model: MaskedLanguageModel, blocks: PieceBlocks, split: str) -> list[Path]:
    files = []
    tokens, types, there = (part[None] for part in blocks[0])
    count = min(_ATTENTION_TOKENS, int(there.sum()))
    first = [part[:, :count].to(device_of(model)) for part in (tokens, types)]
    matrices = attention_of(model.encoder.stack, lambda: model(*first), last=1)
    if matrices:
        files.append(out / "attention.png")
        title = f"last layer with attention, first {count} tokens of {split}"
        plots.attention_matrices(matrices[-1][0], files[-1], title=title)
    encoder = model.encoder
    own = encoder.stack.position, encoder.position_scale, blocks.length, encoder.longest
    return [*files, *draw_encoding(*own, out / "encoding.png")]
