"""Models that draw images byte by byte."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from tqdm import tqdm

from molflt.pretrained.base import Pretrained
from molflt.sequence.generation import sample
from molflt.sequence.pixels import START, PixelModel

__all__ = ["IMAGES", "ImageWriter"]

IMAGES = 8  # that are drawn where no number is asked for


class ImageWriter(Pretrained):
    """Images from nothing, or that go on below given rows; `molflt.load` makes it."""

    models: ClassVar = (PixelModel,)
    model: PixelModel

    def generate(
        self,
        count: int | None = None,
        given: Tensor | None = None,
        rows: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
        progress: bool = False,
    ) -> Tensor:
        """Draws images, all of them at once.

        Args:
            count: how many, from nothing; 8 by default.
            given: images to go on with instead, (n, channels, side, side), bytes.
            rows: how many of their upper rows are given; half of them by default.
            temperature: below 1, likely bytes become likelier; 0 takes the likeliest.
            top_k: draw from so many of the likeliest bytes alone; None for all.
            seed: of the draws; they depend on how many images are drawn together.
            progress: show a bar.

        Returns:
            (n, channels, side, side) uint8, on the CPU.

        Raises:
            ValueError: for an option outside its range or without effect, or images of another
                shape.
        """
        known = self._known(count, given, rows)
        prompt = torch.cat((known.new_full((len(known), 1), START), known), dim=1)
        left = self.model.longest - known.shape[1]
        generator = torch.Generator().manual_seed(seed)
        drawn = sample(self.model, prompt, left, temperature, top_k, generator)
        bar = tqdm(drawn, total=left, desc="bytes", disable=None if progress else True)
        values = torch.cat((known.cpu(), torch.stack(list(bar), dim=1)), dim=1)
        return self.model.images_of(values)

    def _known(self, count: int | None, given: Tensor | None, rows: int | None) -> Tensor:
        """Bytes that are given, (images, bytes), on the device of the model; there may be none."""
        device = next(self.model.parameters()).device
        if given is None:
            if rows is not None:
                raise ValueError(f"rows={rows} has no effect without images to go on with")
            count = IMAGES if count is None else count
            if count < 1:
                raise ValueError(f"count must be at least 1; got {count}")
            return torch.zeros(count, 0, dtype=torch.long, device=device)
        if count is not None:
            raise ValueError(f"count={count} has no effect beside given images; leave it out")
        side = self.model.image_size
        rows = side // 2 if rows is None else rows
        if not 1 <= rows < side:
            raise ValueError(
                f"rows must be 1 to {side - 1}, of an image of {side}, so that something is left "
                f"to draw; got {rows}"
            )
        return self.model.bytes_of(given.to(device))[:, : rows * side * self.model.channels]
