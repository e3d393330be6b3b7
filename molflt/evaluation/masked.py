"""Evaluation of a masked language model: how well it fills gaps, where heads look."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from molflt import plots
from molflt.data.text.tokenized import PieceBlocks, read_pieces
from molflt.data.text.tokenizer import TOKENIZER, Tokenizer
from molflt.evaluation.attention import _attention_of
from molflt.evaluation.proteins import Unigram, draw_substitutions, residue_table, unigram_of
from molflt.evaluation.report import Report, align
from molflt.evaluation.results import begin_results
from molflt.evaluation.splits import named_sources
from molflt.evaluation.tokens import draw_encoding, expect_finite, expect_size, read_kept
from molflt.memory import within_memory
from molflt.sequence.masked import MaskedLanguageModel
from molflt.tasks.masked import MaskedTask
from molflt.tasks.masking import Draws
from molflt.training.config import Config

__all__ = ["evaluate", "load_tokenizer", "tokenizer_of"]

_ATTENTION_TOKENS = 128  # of the picture of attention matrices


def evaluate(
    run: Path,
    model: MaskedLanguageModel,
    config: Config,
    out: Path,
    splits: list[str] | None = None,
    data: Path | None = None,
    batch_size: int | None = None,
) -> Report:
    """Evaluates a masked language model: perplexity and accuracy in gaps, and whether parts follow.

    Gaps are those of validation: each sequence has its own, whatever the batch. Writes
    attention.png (each head of the last layer that has attention) and, if there is one,
    encoding.png. Proteins: beside the unigram model of the training file, and substitutions.png.

    Args:
        run: folder of the training run.
        model: in evaluation mode.
        config: the run's.
        out: folder to write.
        splits: some of train, val and test; by default val, and test if the run names it.
        data: another text instead, a file or an hf: name.
        batch_size: sequences in a batch; by default as in training, which decides where wrong
            second parts come from.

    Returns:
        Per split: perplexity, accuracy_percent, next_sentence_percent if the model tells it, and
        the number of gaps. Of proteins also residue_perplexity, residue_accuracy_percent and
        residues, of gaps that show the mask alone, unigram_perplexity and unigram_accuracy_percent.

    Raises:
        FileNotFoundError: if the run's tokenizer or a text is missing.
        ValueError: if a text cannot be used or has no gaps, or the tokenizer is another model's.
    """
    tokenizer, options = load_tokenizer(run, model.vocabulary), config["data"]
    length, pairs = int(str(options["length"])), model.next_sentence is not None
    shares = _shares(config["task"])
    task = MaskedTask(model, **shares)
    size = int(str(options["batch_size"])) if batch_size is None else batch_size
    results: dict[str, dict[str, float | None]] = {}
    baseline, note = _baseline(str(options["train"]), tokenizer, length, model)
    texts = {}  # all of them, before the first is judged
    for split, source in named_sources(options, splits, data).items():
        texts[split] = read_pieces(source, tokenizer, length, pairs, split)
        task.expect_gaps(texts[split], source)
    for split, blocks in texts.items():
        results[split] = _judged(task, blocks, size, split)[0]
        if tokenizer.letters is not None:
            results[split] |= _per_residue(
                model, shares["mask_rate"], blocks, size, split, baseline
            )
    begin_results(out, "attention.png", "encoding.png", "substitutions.png")
    text, files = _table(results), _draw(out, model, blocks, split)
    if tokenizer.letters is not None:
        png, about = draw_substitutions(model.head, tokenizer.letters, out / "substitutions.png")
        files.append(png)
        text = f"{text}\n\n{residue_table(results)}\n\n{note}\n{about}"
    return Report(results, f"\n\n{text}\n", files)


def load_tokenizer(run: Path, size: int) -> Tokenizer:
    """The tokenizer of a run.

    Args:
        run: folder of a training run.
        size: number of ids that its model has.
    """
    path = run / TOKENIZER
    return tokenizer_of(read_kept(path, "tokenizer"), str(path), size)


def tokenizer_of(content: bytes, name: str, size: int) -> Tokenizer:
    """As `load_tokenizer`, from what the file of that name holds."""
    tokenizer = Tokenizer.from_json(content, name)
    expect_size(name, len(tokenizer), size, "tokenizer")
    return tokenizer


def _baseline(
    source: str, tokenizer: Tokenizer, length: int, model: MaskedLanguageModel
) -> tuple[Unigram | None, str]:
    """Of proteins; see `unigram_of`."""
    if tokenizer.letters is None:
        return None, ""
    possible = model.ordinary.cpu().numpy()
    return unigram_of(
        source, lambda: read_pieces(source, tokenizer, length, use="train").ids, possible
    )


def _shares(task: Mapping[str, object]) -> dict[str, float]:
    names = ("mask_rate", "mask_share", "random_share")
    return {name: float(str(task[name])) for name in names}


def _judged(
    task: MaskedTask, blocks: PieceBlocks, batch_size: int, name: str
) -> tuple[dict[str, float | None], NDArray[np.int64]]:
    """Metrics of a text, and what was in its gaps, (gaps,)."""
    device = next(task.model.parameters()).device
    total = torch.zeros(len(task.sums._fields), dtype=torch.float64)
    told = []
    batch_of = f"{name}: a batch of {batch_size} x {blocks.length:,} tokens"
    with torch.inference_mode(), within_memory(lambda: batch_of, "lower --batch-size"):
        batches = DataLoader(blocks, batch_size=batch_size)
        for batch in tqdm(batches, desc=name, leave=False, disable=None):
            moved = cast("tuple[Tensor, Tensor, Tensor]", tuple(part.to(device) for part in batch))
            total += torch.stack(list(task.judge(moved))).cpu()
            targets = task.gaps(moved, Draws.of_content(moved[0], moved[2]))[1]
            told.append(targets[targets >= 0].cpu().numpy())
    expect_finite(name, total)
    return {**task.summarize(total), "gaps": int(total[2])}, np.concatenate(told)


def _per_residue(
    model: MaskedLanguageModel,
    rate: float,
    blocks: PieceBlocks,
    batch_size: int,
    name: str,
    baseline: Unigram | None,
) -> dict[str, float | None]:
    """Metrics in gaps that show nothing but the mask, and of the baseline in these.

    In training a tenth of the gaps shows what belongs there, which a model copies: 18 % of all gaps
    are right that way without a look at any other residue.
    """
    task = MaskedTask(model, mask_rate=rate, mask_share=1.0, random_share=0.0)
    found, told = _judged(task, blocks, batch_size, name)
    return {
        "residue_perplexity": found["perplexity"],
        "residue_accuracy_percent": found["accuracy_percent"],
        "residues": len(told),
        **({} if baseline is None else baseline.judge(told)),
    }


def _table(results: Mapping[str, Mapping[str, float | None]]) -> str:
    keys = ["perplexity", "accuracy_percent", "next_sentence_percent"]
    keys = [key for key in keys if all(key in row for row in results.values())]
    heads = {
        "perplexity": "perplexity",
        "accuracy_percent": "right / %",
        "next_sentence_percent": "pairs right / %",
    }
    lines = [("text", *(heads[key] for key in keys), "gaps")]
    for name, row in results.items():
        lines.append((name, *(f"{row[key]:.2f}" for key in keys), f"{row['gaps']:,}"))
    return align(lines)


def _draw(out: Path, model: MaskedLanguageModel, blocks: PieceBlocks, split: str) -> list[Path]:
    files = []
    tokens, types, there = (part[None] for part in blocks[0])
    count = min(_ATTENTION_TOKENS, int(there.sum()))
    device = next(model.parameters()).device
    first = [part[:, :count].to(device) for part in (tokens, types)]
    matrices = _attention_of(model.encoder.stack, lambda: model(*first), last=1)
    if matrices:
        files.append(out / "attention.png")
        title = f"last layer with attention, first {count} tokens of {split}"
        plots.attention_matrices(matrices[-1][0], files[-1], title=title)
    encoder = model.encoder
    own = encoder.stack.position, encoder.position_scale, blocks.length, encoder.longest
    return [*files, *draw_encoding(*own, out / "encoding.png")]
