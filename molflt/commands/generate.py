"""``molflt generate``: text from a trained language model."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from molflt.evaluation.language import load_vocabulary
from molflt.sequence.generation import generate as draw
from molflt.sequence.language_model import LanguageModel
from molflt.training.checkpoint import load_run

__all__ = ["generate"]


def generate(
    run: Path,
    prompt: str = "",
    tokens: int = 100,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    checkpoint: str = "best",
    device: str = "auto",
) -> None:
    """Writes text that follows a prompt, token by token.

    Mechanisms with a state of constant size take as long for the last token as for the first.

    Args:
        run: folder of a training run of a language model.
        prompt: what the text begins with.
        tokens: how many are drawn.
        temperature: below 1, likely tokens become likelier; 0 takes the likeliest.
        top_k: draw from so many of the likeliest tokens alone; null for all.
        seed: of the draws.
        checkpoint: best, last, or a safetensors file.
        device: auto, cpu, cuda or cuda:N.

    Raises:
        FileNotFoundError: if the run, its checkpoint, or its vocabulary is missing.
        ValueError: if it is not a language model, or for an option outside its range.
    """
    run = Path(run)
    model, _ = load_run(run, checkpoint, device)
    if not isinstance(model, LanguageModel):
        raise ValueError(f"{run}: not a language model; expected a run with recipe: language")
    vocabulary = load_vocabulary(run, model.vocabulary)
    known = vocabulary.encode(prompt).tolist()
    ids = torch.tensor([[vocabulary.eos, *known]], device=next(model.parameters()).device)
    if not model.decodes:
        print(
            "molflt: this mechanism leaves no state to decode from; each token computes the whole "
            "text again",
            file=sys.stderr,
        )
    generator = torch.Generator().manual_seed(seed)
    drawn = draw(model, ids, tokens, temperature, top_k, generator)
    line = known[:]  # of the text so far; decoded together, for spaces and bytes of one character
    written = vocabulary.decode(line)
    print(written, end="", flush=True)
    for token in drawn:
        line.append(token)
        text = vocabulary.decode(line)
        if text.endswith("\ufffd"):  # the rest of a character may follow
            continue
        print(text[len(written) :], end="", flush=True)
        line, written = ([], "") if text.endswith("\n") else (line, text)
    print(vocabulary.decode(line)[len(written) :])
