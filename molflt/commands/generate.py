"""``molflt generate``: text, translations or images from a trained model."""

import sys
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from molflt.commands.options import refuse_idle
from molflt.data.images.files import read_alike, write_sheet
from molflt.data.text.parallel import read_lines
from molflt.files import expect_ending, expect_writable
from molflt.pretrained import ImageWriter, TextWriter, Translator, load
from molflt.pretrained.tokens import IMAGES


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
    """Generates text, translates sentences, or generates images.

    Language models continue a prompt token by token. Image models (recipe image_generation) write a
    PNG of new images, or complete images from their upper rows. Attention mechanisms with a state
    of constant size take the same time for every token.

    Args:
        run: folder of a training run with the recipe language, translation or image_generation, an
            exported model, or hf:OWNER/NAME.
        prompt: beginning of the text, or the sentence to translate.
        file: for translation, a text file with one sentence per line, instead of the prompt. For
            images, an image to complete, a folder of images, or an idx file; the images must have
            the size and channels of the training images. The PNG shows the known rows, the result
            and the original.
        tokens: number of tokens to generate (language; default 100).
        temperature: values below 1 favor likely tokens; 0 selects the most likely token (language,
            images; default 1).
        top_k: sample only from the k most likely tokens (language, images; default all).
        seed: random seed (language, images; default 0).
        images: number of images; with `file`, its first images are used (images; default 8).
        rows: number of known rows at the top of each image in `file` (images; default half).
        fit: scale down larger images in `file`, as data.image_size does in training (images).
        out: PNG to write; by default samples.png, or completions.png with `file`, in the run
            folder, or in the current folder if the model is not a run (images).
        beam: beam size, as in `molflt evaluate` (translation; default 5).
        length_penalty: length penalty, as in `molflt evaluate` (translation; default 1).
        checkpoint: best (the default), last, or a safetensors file; requires a training run.
        device: auto, cpu, cuda or cuda:N.
    """
    if temperature == 0:
        refuse_idle(run, "temperature 0 draws nothing", {"top_k": top_k, "seed": seed})
    if beam == 1:
        refuse_idle(run, "a beam of 1", {"length_penalty": length_penalty})
    model = load(run, device, checkpoint=checkpoint)
    of_sampling = {"temperature": temperature, "top_k": top_k, "seed": seed}
    of_search = {"beam": beam, "length_penalty": length_penalty}
    of_images = {"images": images, "rows": rows, "fit": fit or None, "out": out}
    given: dict[str, Any] = {**of_sampling, **of_search, "tokens": tokens}
    given = {name: value for name, value in given.items() if value is not None}
    if isinstance(model, ImageWriter | TextWriter) and not model.model.decodes:
        print(
            "molflt: this attention mechanism does not support step-by-step decoding; the whole "
            "sequence is recomputed for every token",
            file=sys.stderr,
        )
    if isinstance(model, ImageWriter):
        refuse_idle(
            run, "an image model", {"prompt": prompt or None, "tokens": tokens, **of_search}
        )
        _draw(model, file, images, rows, fit, out, given)
    elif isinstance(model, Translator):
        refuse_idle(run, "a translation model", {**of_sampling, "tokens": tokens, **of_images})
        if bool(prompt) == (file is not None):
            got = "both" if prompt else "neither"
            raise ValueError(f"{run}: expected either --prompt TEXT or --file FILE; got {got}")
        sentences = [prompt] if file is None else read_lines(str(file))
        for line in model.translate(sentences, **given):
            print(line)
    elif isinstance(model, TextWriter):
        refuse_idle(run, "a language model", {"file": file, **of_search, **of_images})
        for piece in model.stream(prompt, **given):
            print(piece, end="", flush=True)
        print()
    else:
        raise ValueError(
            f"{run}: expected a model with the recipe language, translation or image_generation; "
            f"got {model.trained.recipe}"
        )


def _draw(
    model: ImageWriter,
    file: Path | None,
    images: int | None,
    rows: int | None,
    fit: bool,
    out: Path | None,
    options: Mapping[str, Any],
) -> None:
    """Writes new images to `out`, or completions of the images in `file`."""
    size, channels, path = model.model.image_size, model.model.channels, model.trained.path
    if out is None:
        name = "samples.png" if file is None else "completions.png"
        out = (path if path.is_dir() else Path()) / name
    expect_ending(out, ".png")
    inputs = [] if file is None else [file]
    if file is not None and file.resolve() in out.resolve().parents:
        inputs.append(out)  # in the folder `file`, it would become an input image
    expect_writable(out, *inputs)
    count = IMAGES if images is None else images
    if file is None:
        refuse_idle(model.name, "no --file to continue", {"rows": rows, "fit": fit or None})
        drawn = model.generate(count, progress=True, **options)
        write_sheet(out, [drawn])
        print(f"{out}: {len(drawn)} images")
        return
    original = torch.stack(list(islice(read_alike(file, size, channels, fit), count)))
    rows = size // 2 if rows is None else rows
    drawn = model.generate(given=original, rows=rows, progress=True, **options)
    given = original.clone()
    given[:, :, rows:] = 128  # gray
    write_sheet(out, [given, drawn, original])
    print(f"{out}: {len(drawn)} images; rows: given ({rows} of {size}), drawn, original")
