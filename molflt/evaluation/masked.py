"""Evaluation of masked language models: perplexity and accuracy of masked tokens, attention."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from molflt.data.text.tokenized import PieceBlocks, read_pieces
from molflt.evaluation.common import (
    device_of,
    draw_attention,
    draw_encoding,
    load_tokenizer,
    named_sources,
    total_of,
)
from molflt.evaluation.proteins import Residues
from molflt.evaluation.results import Evaluation, Results, begin_results, results_table
from molflt.sequence.masked import MaskedLanguageModel
from molflt.tasks.masked import Draws, MaskedTask
from molflt.training.config import Config

__all__ = ["evaluate"]

_ATTENTION_TOKENS = 128  # tokens in the picture of attention matrices
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
    attention.png (each head of the last attention layer) and, with a relative encoding,
    encoding.png. For protein models, also compares the model with the unigram model of the training
    file and writes substitutions.png.

    Args:
        splits: any of train, val and test; by default val, and also test if the run names it.
        data: another text to evaluate instead: a file or an hf: name.
        batch_size: sequences in a batch; the wrong second parts also depend on this; by default as
            in training.

    Returns:
        Per split: perplexity, accuracy_percent, next_sentence_percent if the model predicts it, and
        gaps (their number). For proteins also residue_perplexity, residue_accuracy_percent and
        residues (their number) with the mask token in every gap, and unigram_perplexity and
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
    letters, residues = tokenizer.letters, None
    if letters is not None:
        train, possible = str(options["train"]), model.ordinary.cpu().numpy()
        residues = Residues(
            train, lambda: read_pieces(train, tokenizer, length, use="train").ids, possible
        )
    texts = {}  # read all of them before evaluating the first
    for split, source in named_sources(options, splits, data).items():
        texts[split] = read_pieces(source, tokenizer, length, pairs, split)
        task.expect_gaps(texts[split], source)
    for split, blocks in texts.items():
        results[split] = _judged(task, blocks, size, split)
        if residues is not None:  # in training, a tenth of the gaps show the right token
            always = MaskedTask(model, shares["mask_rate"], mask_share=1.0, random_share=0.0)
            found = _judged(always, blocks, size, split)
            targets = _targets(always, blocks, size)
            results[split] |= residues.judge(
                found["perplexity"], found["accuracy_percent"], targets
            )
    begin_results(out, "attention.png", "encoding.png", "substitutions.png")
    columns = {k: v for k, v in _COLUMNS.items() if all(k in row for row in results.values())}
    text, files = results_table("text", columns, results), _draw(out, model, blocks, split)
    if residues is not None and letters is not None:
        files.append(out / "substitutions.png")
        text += residues.report(results, model.head, letters, files[-1])
    return Evaluation(results, f"\n\n{text}\n", files)


def _judged(task: MaskedTask, blocks: PieceBlocks, size: int, name: str) -> dict[str, float | None]:
    """Returns the metrics of a text."""
    loader = DataLoader(blocks, size)
    total = total_of(task, loader, name, f"{size} x {blocks.length:,} tokens")
    return {**task.summarize(total), "gaps": int(total[2])}


def _targets(task: MaskedTask, blocks: PieceBlocks, size: int) -> NDArray[np.int64]:
    """Returns the hidden tokens of a text, (gaps,)."""
    device, found = device_of(task.model), []
    for batch in DataLoader(blocks, size):
        tokens, types, there = (part.to(device) for part in batch)
        targets = task.gaps((tokens, types, there), Draws.of_content(tokens, there))[1]
        found.append(targets[targets >= 0].cpu().numpy())
    return np.concatenate(found)


def _draw(out: Path, model: MaskedLanguageModel, blocks: PieceBlocks, split: str) -> list[Path]:
    tokens, types, there = (part[None] for part in blocks[0])
    count = min(_ATTENTION_TOKENS, int(there.sum()))
    first = [part[:, :count].to(device_of(model)) for part in (tokens, types)]
    stack, scale = model.encoder.stack, model.encoder.position_scale
    title = f"last layer with attention, first {count} tokens of {split}"
    files = draw_attention(stack, lambda: model(*first), out / "attention.png", title)
    return files + draw_encoding(stack.position, scale, blocks.length, out / "encoding.png")
