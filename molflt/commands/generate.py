"""``molflt generate``: text from a trained language model."""

from __future__ import annotations

import sys

from molflt.pretrained import TextWriter, load

__all__ = ["generate"]


def generate(
    run: str,
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
        run: folder of a training run of a language model, an exported model, or hf:OWNER/NAME.
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
    model = load(run, device, checkpoint=checkpoint)
    if not isinstance(model, TextWriter):
        raise ValueError(f"{run}: not a language model; expected a run with recipe: language")
    if not model.model.decodes:
        print(
            "molflt: this mechanism leaves no state to decode from; each token computes the whole "
            "text again",
            file=sys.stderr,
        )
    for piece in model.stream(prompt, tokens, temperature, top_k, seed):
        print(piece, end="", flush=True)
    print()
