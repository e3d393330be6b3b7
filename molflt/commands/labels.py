"""Rows of ``molflt predict`` for lines of a text and for images."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch

from molflt.data.images.unlabeled import read_images
from molflt.data.text.parallel import read_lines
from molflt.pretrained import GapFiller, ImageLabeler, SentenceLabeler

__all__ = ["Labeler", "label"]

Labeler = GapFiller | ImageLabeler | SentenceLabeler
_GUESSES = 5


def label(model: Labeler, source: Path, batch_size: int) -> list[dict[str, object]]:
    """Predicts each line, masked token or image of a file.

    Args:
        model: model, which determines the content of the file: a sentence or two tab-separated
            sentences per line; lines with masked tokens; an image, a folder of images, or an idx
            file.
        source: file or folder.
        batch_size: sentences or images in a batch.

    Returns:
        The class and its probability, or the score, of sentences and images; the most probable
        tokens at masked ones.
    """
    if isinstance(model, GapFiller):
        return list(_gaps(model, source))
    if isinstance(model, SentenceLabeler):
        return _sentences(model, source, batch_size)
    return list(_images(model, source, batch_size))


def _gaps(model: GapFiller, source: Path) -> Iterator[dict[str, object]]:
    for number, line in enumerate(read_lines(str(source)), 1):
        try:
            gaps = model.fill(line, _GUESSES)
        except ValueError as error:
            raise ValueError(f"{source}: line {number}: {error}") from None
        for place, guesses in enumerate(gaps, 1):
            for rank, (piece, share) in enumerate(guesses, 1):
                row = {"line": number, "gap": place, "rank": rank, "piece": piece}
                yield {**row, "probability": share}


def _sentences(model: SentenceLabeler, source: Path, batch_size: int) -> list[dict[str, object]]:
    parts = [tuple(line.split("\t")) for line in read_lines(str(source))]
    columns = len(parts[0])
    for number, cells in enumerate(parts, 1):
        if len(cells) != columns or columns > 2 or not all(cells):
            raise ValueError(
                f"{source}: line {number}: expected a sentence, or two separated by a tab, as in "
                f"line 1 ({columns}); got {len(cells)}, {cells.count('')} of them empty"
            )
    texts = [(cells[0], cells[1]) if columns == 2 else cells[0] for cells in parts]
    found = model.classify(texts, batch_size=batch_size)
    if model.model.classes == 1:
        return [{"line": number, "score": one.probability} for number, one in enumerate(found, 1)]
    return [
        {"line": number, "label": one.name, "probability": one.probability}
        for number, one in enumerate(found, 1)
    ]


def _images(model: ImageLabeler, source: Path, batch_size: int) -> Iterator[dict[str, object]]:
    side, channels = model.model.image_size, model.model.channels
    images = read_images(source, side, channels)
    while some := list(islice(images, batch_size)):
        found = model.classify(torch.stack([image for _, image in some]), batch_size)
        for (name, _), one in zip(some, found, strict=True):
            yield {"image": name, "label": one.name, "probability": one.probability}
