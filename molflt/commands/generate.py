"""``molflt generate``: text from a trained language model, or the translation of a text."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from molflt.commands.options import refuse_idle
from molflt.data.text.parallel import read_lines
from molflt.pretrained import TextWriter, Translator, load

__all__ = ["generate"]


def generate(
    run: str,
    prompt: str = "",
    file: Path | None = None,
    tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    seed: int | None = None,
    beam: int | None = None,
    length_penalty: float | None = None,
    checkpoint: str = "best",
    device: str = "auto",
) -> None:
    """Writes text that follows a prompt, token by token; or translates sentences, line by line.

    Mechanisms with a state of constant size take as long for the last token as for the first.

    Args:
        run: folder of a training run of a language or translation model, an exported model, or
            hf:OWNER/NAME.
        prompt: what the text begins with; of a translation, the sentence.
        file: of a translation, a text with a sentence in each line, instead of the prompt.
        tokens: how many are drawn; 100 by default. Of language models, as are the next three.
        temperature: below 1, likely tokens become likelier; 0 takes the likeliest; 1 by default.
        top_k: draw from so many of the likeliest tokens alone; null for all.
        seed: of the draws; 0 by default.
        beam: hypotheses of a translation, as in `molflt evaluate`; 5 by default.
        length_penalty: of a translation, likewise; 1 by default.
        checkpoint: best, last, or a safetensors file.
        device: auto, cpu, cuda or cuda:N.

    Raises:
        FileNotFoundError: if the run, its checkpoint, its vocabulary or the file is missing.
        ValueError: if it is neither kind of model, or for an option outside its range, or of the
            other kind.
    """
    model = load(run, device, checkpoint=checkpoint)
    drawing = {"tokens": tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
    search = {"beam": beam, "length_penalty": length_penalty}
    if isinstance(model, Translator):
        refuse_idle(run, "a translation model, which draws nothing", drawing)
        given = {name: value for name, value in search.items() if value is not None}
        _translate(model, prompt, file, given)
    elif isinstance(model, TextWriter):
        refuse_idle(run, "a language model, which translates nothing", {"file": file, **search})
        given = {name: value for name, value in drawing.items() if value is not None}
        _write(model, prompt, given)
    else:
        raise ValueError(
            f"{run}: not a language model; expected a run with recipe: language or translation"
        )


def _translate(
    model: Translator, prompt: str, file: Path | None, options: Mapping[str, Any]
) -> None:
    if bool(prompt) == (file is not None):
        raise ValueError(
            f"{model.name}: expected what to translate, either --prompt TEXT or --file FILE; got "
            f"{'both' if prompt else 'neither'}"
        )
    for line in model.translate([prompt] if file is None else read_lines(str(file)), **options):
        print(line)


def _write(model: TextWriter, prompt: str, options: Mapping[str, Any]) -> None:
    if not model.model.decodes:
        print(
            "molflt: this mechanism leaves no state to decode from; each token computes the whole "
            "text again",
            file=sys.stderr,
        )
    for piece in model.stream(prompt, **options):
        print(piece, end="", flush=True)
    print()
