"""Evaluation of translation models: BLEU, chrF, perplexity and attention."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from molflt import plots
from molflt.attention.checks import no_effect
from molflt.data.text.datamodule import padded_rows
from molflt.data.text.parallel import Pairs, paired, read_parallel
from molflt.data.text.tokenizer import Tokenizer, find_tokenizer
from molflt.evaluation import common
from molflt.evaluation.results import Evaluation, Results, results_table
from molflt.files import write_atomically
from molflt.optional import require
from molflt.sequence.encoder_decoder import EncoderDecoder
from molflt.sequence.generation import beam_search
from molflt.tasks.translation import TranslationTask
from molflt.training.config import Config


def evaluate(
    run: Path,
    model: EncoderDecoder,
    config: Config,
    out: Path,
    batch_size: int = 64,
    beam: int = 5,
    length_penalty: float = 1.0,
    **which: Any,
) -> Evaluation:
    """Evaluates a translation model: BLEU of its translations and perplexity of the references.

    Writes translations-SPLIT.txt (one line per source sentence), attention.png and
    cross-attention.png (each head of the last decoder layer, for the first pair) and, with a
    relative encoding, encoding.png. The BLEU signature states how the score was computed. Case is
    ignored if the tokenizer ignores it.

    Args:
        batch_size: number of sentences per batch.
        beam: number of hypotheses per sentence; 1 selects the most probable token at each step.
        length_penalty: log p of a translation is divided by (number of tokens) ** length_penalty.
        which: see `molflt.evaluation.common.named_sources`.

    Returns:
        Per split: bleu, chrf, perplexity, pairs (the number of pairs) and length_ratio (length of
        the translations relative to that of the references).
    """
    if beam == 1 and length_penalty != 1:
        no_effect("with a beam of 1", length_penalty=length_penalty)
    tokenizer, options = Tokenizer.from_json(*find_tokenizer(run)), config["data"]
    languages = options["source"], options["target"]
    lowercase = tokenizer.ignores_case
    bleu(["a"], ["a"])  # fails without sacrebleu before anything is computed
    results: Results = {}
    texts = {}  # all texts are read before the first is translated
    for split, source in common.named_sources(options, **which).items():
        text = read_parallel(source, *languages)
        texts[split] = text, Pairs(text, tokenizer)
        for path, side in zip(text.files, text[:2], strict=True):
            for number, ids in enumerate(tokenizer.encode(list(side)), 1):
                _expect_length(f"{path}: line {number:,}", len(ids) + 1, model.longest)
    task = TranslationTask(model, label_smoothing=0.0)
    for split, (text, pairs) in texts.items():
        loader = DataLoader(pairs, batch_size, collate_fn=partial(paired, pad=tokenizer.pad))
        total = common.total_of(task, loader, split, f"{batch_size} pairs")
        results[split] = {"perplexity": task.summarize(total)["perplexity"]}
        translated = translate(
            model, tokenizer, text.source, beam, length_penalty, batch_size, split
        )
        write_atomically(out / f"translations-{split}.txt", "\n".join([*translated, ""]).encode())
        scores = bleu(translated, text.target, lowercase)
        results[split] |= {"bleu": scores.bleu, "chrf": scores.chrf}
        results[split] |= {"length_ratio": scores.length_ratio, "pairs": len(translated)}
    _draw(out, model, pairs, tokenizer, split)  # of the last split
    settings = f"beam {beam}, length penalty {length_penalty:g}, {'-'.join(languages)}"
    settings += ", ignoring case, as the tokenizer does" if lowercase else ""
    table = results_table("text", results)
    return Evaluation(results, f", {settings}\n\n{table}\n\nsacrebleu {scores.signature}\n")


class Bleu(NamedTuple):
    """Scores of translations, computed by sacrebleu."""

    bleu: float
    chrf: float
    length_ratio: float
    signature: str  # references, case, tokenization, smoothing and version of BLEU


def bleu(translations: Sequence[str], references: Sequence[str], lowercase: bool = False) -> Bleu:
    """Computes BLEU (arXiv:1804.08771) and chrF of translations, with one reference each.

    Case is ignored if `lowercase` is True.
    """
    scores = require("sacrebleu.metrics", "BLEU", "text")
    metric, others = scores.BLEU(lowercase=lowercase), scores.CHRF(lowercase=lowercase)
    score = metric.corpus_score(list(translations), [list(references)])
    chrf = others.corpus_score(list(translations), [list(references)]).score
    return Bleu(score.score, chrf, score.ratio, str(metric.get_signature()))


def translate(
    model: EncoderDecoder,
    tokenizer: Tokenizer,
    sentences: Sequence[str],
    beam: int = 5,
    length_penalty: float = 1.0,
    batch_size: int = 64,
    name: str = "sentences",
) -> list[str]:
    """Translates sentences in batches of similar length; returns translations in the given order.

    See `molflt.sequence.beam_search` for `beam` and `length_penalty`.
    """
    ids = [[*tokens, tokenizer.sep] for tokens in tokenizer.encode(list(sentences))]
    for number, tokens in enumerate(ids, 1):
        _expect_length(f"{name}: sentence {number:,}", len(tokens), model.longest)
        if len(tokens) == 1:
            raise ValueError(f"{name}: sentence {number:,} is empty; expected text; remove it")
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]), reverse=True)
    parts = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    device, translations = common.device_of(model), [""] * len(ids)
    batch_of = f"{batch_size} sentences with {beam} hypotheses each"
    with common.batches(parts, model, name, batch_of) as loaded:
        for batch in loaded:
            rows = [torch.tensor(ids[i], device=device) for i in batch]
            source = padded_rows(rows, tokenizer.pad)
            mask = padded_rows([torch.ones_like(row) for row in rows], 0).bool()
            ends = {"begin": tokenizer.cls, "end": tokenizer.sep}
            hypotheses = beam_search(
                model, source, mask, **ends, beam=beam, length_penalty=length_penalty
            )
            for i, best in zip(batch, hypotheses, strict=True):
                translations[i] = tokenizer.decode(best.tokens).strip()
    return translations


def _expect_length(name: str, tokens: int, longest: int | None) -> None:
    if longest is not None and tokens > longest:
        raise ValueError(
            f"{name} has {tokens:,} tokens; expected at most {longest:,}; shorten it, or train "
            "with a larger model.max_length"
        )


def _draw(out: Path, model: EncoderDecoder, pairs: Pairs, tokenizer: Tokenizer, split: str) -> None:
    source, target = (ids[None].to(common.device_of(model)) for ids in pairs[0])
    inputs = target[:, :-1]
    matrices = common.attention_of(model.decoder, lambda: model(source, inputs), last=2)
    queries = [tokenizer.token(int(number)) for number in inputs[0]]
    keys = [tokenizer.token(int(number)) for number in source[0]]
    figures = (("attention", "target", queries), ("cross-attention", "source", keys))
    for matrix, (name, side, tokens) in zip(matrices, figures, strict=True):
        title, file = f"last layer, target to {side}, first pair of {split}", out / f"{name}.png"
        plots.attention_matrices(matrix[0], file, title=title, tokens=(queries, tokens))
    length = min(max(pairs.sizes), model.longest or max(pairs.sizes))
    position, scale = model.decoder.stack.position, model.position_scale
    common.draw_encoding(position, scale, length, out / "encoding.png")
