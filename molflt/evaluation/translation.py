"""Evaluation of a translation model: BLEU with its signature, perplexity, where heads look."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from molflt import plots
from molflt.data.text.parallel import Pairs, ParallelText, paired, read_parallel
from molflt.data.text.tokenizer import Tokenizer
from molflt.evaluation.attention import _attention_of
from molflt.evaluation.masked import load_tokenizer
from molflt.evaluation.report import Report, align
from molflt.evaluation.results import begin_results
from molflt.evaluation.splits import named_sources
from molflt.evaluation.tokens import draw_encoding, expect_finite
from molflt.files import write_atomically
from molflt.memory import within_memory
from molflt.sequence.beam import beam_search
from molflt.sequence.encoder_decoder import EncoderDecoder
from molflt.tasks.translation import TranslationTask
from molflt.training.config import Config

__all__ = ["Bleu", "bleu", "evaluate", "translate"]


def evaluate(
    run: Path,
    model: EncoderDecoder,
    config: Config,
    out: Path,
    splits: list[str] | None = None,
    data: Path | None = None,
    batch_size: int = 64,
    beam: int = 5,
    length_penalty: float = 1.0,
) -> Report:
    """Evaluates a translation model: BLEU of its translations, and perplexity of the references.

    Writes translations-SPLIT.txt, a line for each source, attention.png and cross-attention.png
    (each head of the last layer of the decoder, on the first pair) and, if there is one,
    encoding.png. The signature of BLEU says how it was computed: without case where the tokenizer
    knows none.

    Args:
        run: folder of the training run.
        model: in evaluation mode.
        config: the run's.
        out: folder to write.
        splits: some of train, val and test; by default val, and test if the run names it.
        data: name of another pair of files instead, without the language.
        batch_size: sentences in a batch.
        beam: hypotheses of each sentence; 1 takes the most probable token at each step.
        length_penalty: what the number of tokens is raised to before log p is divided by it.

    Returns:
        Per split: bleu, chrf, perplexity, pairs, and length_ratio of translations and references.

    Raises:
        FileNotFoundError: if the run's tokenizer or a file is missing.
        ModuleNotFoundError: without sacrebleu.
        ValueError: if a text cannot be used, or the tokenizer is another model's.
    """
    tokenizer, options = load_tokenizer(run, model.vocabulary), config["data"]
    languages = str(options["source"]), str(options["target"])
    lowercase = tokenizer.ignores_case  # options say nothing of a tokenizer that was given
    bleu(["a"], ["a"])  # without sacrebleu there is nothing to begin
    results: dict[str, dict[str, float | None]] = {}
    lines: dict[str, list[str]] = {}
    texts = {}  # all of them, before the first is translated
    for split, name in named_sources(options, splits, data).items():
        text = read_parallel(name, *languages)
        texts[split] = text, Pairs(text, tokenizer)
        _expect_short(text, tokenizer, model.longest)
    for split, (text, pairs) in texts.items():
        results[split] = _judged(model, pairs, tokenizer.pad, batch_size, split)
        told = translate(model, tokenizer, text.source, beam, length_penalty, batch_size, split)
        lines[split], found = told, bleu(told, text.target, lowercase)
        results[split] |= found.metrics() | {"pairs": len(told)}
    begin_results(out, "attention.png", "cross-attention.png", "encoding.png")
    files = [out / f"translations-{split}.txt" for split in lines]
    for path, told in zip(files, lines.values(), strict=True):
        write_atomically(path, ("\n".join(told) + "\n").encode())
    how = f"beam {beam}, length penalty {length_penalty:g}, {'-'.join(languages)}"
    how += ", without case, as the tokenizer" if lowercase else ""
    table = f", {how}\n\n{_table(results)}\n\nsacrebleu {found.signature}\n"
    return Report(results, table, [*files, *_draw(out, model, pairs, tokenizer, split)])


class Bleu(NamedTuple):
    """What sacrebleu says of translations."""

    bleu: float
    chrf: float
    length_ratio: float
    signature: str
    """how BLEU was computed: references, case, tokenization, smoothing, version"""

    def metrics(self) -> dict[str, float]:
        """The numbers by name."""
        return {"bleu": self.bleu, "chrf": self.chrf, "length_ratio": self.length_ratio}


def bleu(told: Sequence[str], references: Sequence[str], lowercase: bool = False) -> Bleu:
    """BLEU (arXiv:1804.08771) and chrF of translations, with one reference each.

    Args:
        told: translations.
        references: as many.
        lowercase: whether case makes no difference.
    """
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError:
        raise ModuleNotFoundError(
            "BLEU needs the package sacrebleu; got none; run: pip install molflt[text]"
        ) from None
    metric = BLEU(lowercase=lowercase)
    score = metric.corpus_score(list(told), [list(references)])
    chrf = CHRF(lowercase=lowercase).corpus_score(list(told), [list(references)]).score
    ratio = score.sys_len / max(1, score.ref_len)
    return Bleu(score.score, chrf, ratio, str(metric.get_signature()))


def translate(
    model: EncoderDecoder,
    tokenizer: Tokenizer,
    sentences: Sequence[str],
    beam: int = 5,
    length_penalty: float = 1.0,
    batch_size: int = 64,
    name: str = "sentences",
) -> list[str]:
    """Translations of sentences, in their order.

    Args:
        model: in evaluation mode.
        tokenizer: of the model.
        sentences: to translate.
        beam: hypotheses of each sentence, see `molflt.sequence.beam_search`.
        length_penalty: see there.
        batch_size: sentences in a batch; those of similar length go together.
        name: of the sentences, for messages.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1; got {batch_size}")
    ids = [[*one, tokenizer.sep] for one in tokenizer.encode(list(sentences))]
    for number, one in enumerate(ids, 1):
        _expect_length(f"{name}: sentence {number:,}", len(one), model.longest)
        if len(one) == 1:
            raise ValueError(f"{name}: sentence {number:,} is empty; expected text; leave it out")
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]), reverse=True)
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    device, told = model.head.weight.device, [""] * len(ids)
    batch_of = f"{name}: a batch of {batch_size} sentences and {beam} hypotheses each"
    with within_memory(lambda: batch_of, "lower --batch-size or --beam"):
        for batch in tqdm(batches, desc=name, leave=False, disable=None):
            source, there = _padded([ids[i] for i in batch], tokenizer.pad)
            found = beam_search(
                model,
                source.to(device),
                there.to(device),
                begin=tokenizer.cls,
                end=tokenizer.sep,
                beam=beam,
                length_penalty=length_penalty,
            )
            for i, best in zip(batch, found, strict=True):
                told[i] = tokenizer.decode(best.tokens).strip()
    return told


def _padded(rows: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(longest) < lengths[:, None]


def _expect_short(text: ParallelText, tokenizer: Tokenizer, longest: int | None) -> None:
    """Raises ValueError for the first sentence that the model cannot take."""
    for path, side in zip(text.files, text[:2], strict=True):
        for number, one in enumerate(tokenizer.encode(list(side)), 1):
            _expect_length(f"{path}: line {number:,}", len(one) + 1, longest)


def _expect_length(place: str, tokens: int, longest: int | None) -> None:
    if longest is not None and tokens > longest:
        raise ValueError(
            f"{place} has {tokens:,} tokens; the model takes at most {longest:,}; shorten it, or "
            "train with a larger model.max_length"
        )


def _judged(
    model: EncoderDecoder, pairs: Pairs, pad: int, batch_size: int, name: str
) -> dict[str, float | None]:
    """Perplexity of the references; ValueError if it is not finite, or memory does not do."""
    task = TranslationTask(model, label_smoothing=0.0)
    total = torch.zeros(len(task.sums._fields), dtype=torch.float64)
    batch_of = f"{name}: a batch of {batch_size} pairs"
    with torch.inference_mode(), within_memory(lambda: batch_of, "lower --batch-size"):
        for batch in _batches(pairs, pad, batch_size):
            moved = tuple(part.to(model.head.weight.device) for part in batch)
            total += torch.stack(list(task.judge(cast("Any", moved)))).cpu()
    expect_finite(name, total)
    return {"perplexity": task.summarize(total)["perplexity"]}


def _batches(pairs: Pairs, pad: int, batch_size: int) -> Iterator[tuple[Tensor, ...]]:
    yield from DataLoader(pairs, batch_size=batch_size, collate_fn=lambda rows: paired(rows, pad))


def _table(results: Mapping[str, Mapping[str, float | None]]) -> str:
    head = ("text", "BLEU", "chrF", "length ratio", "perplexity", "pairs")
    rows = [
        (
            name,
            *(f"{row[key]:.2f}" for key in ("bleu", "chrf", "length_ratio", "perplexity")),
            f"{row['pairs']:,}",
        )
        for name, row in results.items()
    ]
    return align([head, *rows])


def _draw(
    out: Path, model: EncoderDecoder, pairs: Pairs, tokenizer: Tokenizer, split: str
) -> list[Path]:
    """Both kinds of attention of the decoder's last layer, and the relative encoding."""
    source, target = (ids[None].to(model.head.weight.device) for ids in pairs[0])
    seen = target[:, :-1]
    matrices = _attention_of(model.decoder, lambda: model(source, seen), last=2)
    files = [out / "attention.png", out / "cross-attention.png"]
    words = [[tokenizer.token(int(one)) for one in ids[0]] for ids in (seen, source)]
    sides = zip(("target", "source"), words, strict=True)
    for matrix, file, (what, keys) in zip(matrices, files, sides, strict=True):
        title = f"last layer, target to {what}, first pair of {split}"
        plots.attention_matrices(matrix[0], file, title=title, tokens=(words[0], keys))
    tokens = max(pairs.sizes)
    own = model.decoder.stack.position, model.position_scale, tokens, model.longest
    return [*files, *draw_encoding(*own, out / "encoding.png")]
