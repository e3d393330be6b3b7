"""``molflt generate``: text or images from a trained model, or the translation of a text."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from molflt.commands.options import refuse_idle
from molflt.data.images.sheet import write_sheet
from molflt.data.images.unlabeled import read_alike
from molflt.data.text.parallel import read_lines
from molflt.files import expect_writable
from molflt.pretrained import ImageWriter, TextWriter, Translator, load
from molflt.pretrained.pixels import IMAGES
from molflt.sequence import LanguageModel

__all__ = ["generate"]

_SAMPLES, _COMPLETIONS = "samples.png", "completions.png"
_GREY = 128  # of the rows that are not given


def generate(
    run: str,
    prompt: str = "",
    file: Path | None = None,
    tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    seed: int | None = None,
    images: int | None = None,
    rows: int | None = None,
    fit: bool = False,
    out: Path | None = None,
    beam: int | None = None,
    length_penalty: float | None = None,
    checkpoint: str | None = None,
    device: str = "auto",
) -> None:
    """Writes text that follows a prompt, token by token; or translates sentences, line by line; or
    draws images, byte by byte, into a PNG: from nothing, or below upper rows that are given.

    Mechanisms with a state of constant size take as long for the last token as for the first.

    Args:
        run: folder of a training run of a model of language, translation or images
            (image_generation), an exported model, or hf:OWNER/NAME.
        prompt: what the text begins with; of a translation, the sentence.
        file: of a translation, a text with a sentence in each line, instead of the prompt. Of
            images, those to go on with: one, a folder of them, or an idx file, of the size of the
            training images, and gray where these were; the PNG shows what is given, what was
            drawn, and the original, below each other.
        tokens: how many are drawn; 100 by default. Of language models.
        temperature: below 1, likely tokens become likelier; 0 takes the likeliest; 1 by default.
            Of language and images, as are the next two.
        top_k: draw from so many of the likeliest tokens alone; null for all.
        seed: of the draws; 0 by default.
        images: how many, of a file its first ones; 8 by default. Of images, as are the next three.
        rows: how many upper rows of the images in the file are given; half of them by default.
        fit: scale larger images of the file down, as data.image_size does in training.
        out: PNG to write; by default samples.png, or with `file` completions.png, in the run, else
            here.
        beam: hypotheses of a translation, as in `molflt evaluate`; 5 by default.
        length_penalty: of a translation, likewise; 1 by default.
        checkpoint: of a run: best (the default), last, or a safetensors file.
        device: auto, cpu, cuda or cuda:N.

    Raises:
        FileNotFoundError: if the run, its checkpoint, its vocabulary or the file is missing.
        OSError: if `out` cannot be written.
        ValueError: if it is no such model, or for an option outside its range, or of another
            kind of model, or images that the model cannot take, or that `out` would overwrite.
    """
    model = load(run, device, checkpoint=checkpoint)
    drawing = {"temperature": temperature, "top_k": top_k, "seed": seed}
    search = {"beam": beam, "length_penalty": length_penalty}
    sheet = {"images": images, "rows": rows, "fit": fit or None, "out": out}
    if isinstance(model, ImageWriter):
        idle = {"prompt": prompt or None, "tokens": tokens, **search}
        refuse_idle(run, "a model of images", idle)
        _draw(model, file, images, rows, fit, out, _given(drawing))
        return
    drawing["tokens"] = tokens
    if isinstance(model, Translator):
        refuse_idle(run, "a translation model, which draws nothing", {**drawing, **sheet})
        _translate(model, prompt, file, _given(search))
    elif isinstance(model, TextWriter):
        refuse_idle(
            run, "a language model, which translates nothing", {"file": file, **search, **sheet}
        )
        _write(model, prompt, _given(drawing))
    else:
        raise ValueError(
            f"{run}: not a language model; expected a run with recipe: language, translation or "
            "image_generation"
        )


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options without those that the model has a default for."""
    return {name: value for name, value in options.items() if value is not None}


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


def _draw(
    model: ImageWriter,
    file: Path | None,
    images: int | None,
    rows: int | None,
    fit: bool,
    out: Path | None,
    options: Mapping[str, Any],
) -> None:
    """Draws images, and writes them as a sheet."""
    whole, path = model.model, model.trained.path
    sheet = _SAMPLES if file is None else _COMPLETIONS
    out = (path / sheet if path.is_dir() else Path(sheet)) if out is None else out
    if out.suffix != ".png":
        raise ValueError(f"{out}: expected a name that ends in .png; rename it")
    # an image in the folder is read, too
    inside = file is not None and file.resolve() in out.resolve().parents
    expect_writable(out, *([] if file is None else [file]), *([out] if inside else []))
    if file is None:
        refuse_idle(model.name, "no --file to go on with", {"rows": rows, "fit": fit or None})
        _say_cost(whole)
        drawn = model.generate(images, progress=True, **options)
        write_sheet(out, [drawn])
        print(f"{out}: {len(drawn)} images")
        return
    count = IMAGES if images is None else images
    found = list(islice(read_alike(file, whole.image_size, whole.channels, fit), count))
    original = torch.stack(found)
    rows = whole.image_size // 2 if rows is None else rows
    _say_cost(whole)
    drawn = model.generate(given=original, rows=rows, progress=True, **options)
    given = original.clone()
    given[:, :, rows:] = _GREY
    write_sheet(out, [given, drawn, original])
    print(
        f"{out}: {len(drawn)} images; rows: given ({rows} of {whole.image_size}), drawn, original"
    )


def _say_cost(model: LanguageModel) -> None:
    if not model.decodes:
        print(
            "molflt: this mechanism leaves no state to decode from; each token computes the whole "
            "sequence again",
            file=sys.stderr,
        )


def _write(model: TextWriter, prompt: str, options: Mapping[str, Any]) -> None:
    _say_cost(model.model)
    for piece in model.stream(prompt, **options):
        print(piece, end="", flush=True)
    print()
