"""Autoregressive model of the bytes of images."""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from molflt.attention.checks import at_least_one, tensors, whole
from molflt.sequence.language_model import LanguageModel

LEVELS = 256  # number of possible values of a byte
START = 0  # start token, which has the value of a black byte


class PixelModel(LanguageModel):
    """Causal model of the bytes of an image, p(byte i | bytes 0 .. i - 1).

    This is the image generation model of NPRF (arXiv:2106.12566), appendix A.5, table 6. Bytes are
    ordered by row, then by pixel, then by channel (red, green, blue). Token i is byte i - 1 (the
    first token is `START`) and has the position of byte i, which it predicts.

    One-dimensional relative encodings use the position i times `position_scale`. Three-dimensional
    encodings (`position_options` with `dim: 3`) use (row, column, channel) relative to the first
    byte, times `position_scale`.

    Args:
        channels: number of channels of an image, 1 or 3; inferred from the data if null.
        image_size: side length of the square images, in pixels; inferred from the data if null.
        absolute: encoding of the positions of bytes: "learned", "sinusoidal" or "none"; see
            `molflt.sequence.LanguageModel`.
        language: further arguments of `molflt.sequence.LanguageModel`.
    """

    of_data: ClassVar[tuple[str, ...]] = ()
    _axes = (1, 3)  # index of the byte, or (row, column, channel)

    def __init__(
        self,
        channels: int | None = None,
        image_size: int | None = None,
        absolute: Literal["none", "sinusoidal", "learned"] = "learned",
        **language: Any,
    ) -> None:
        if channels is None or image_size is None:
            raise ValueError(f"expected numbers; got {channels=}, {image_size=}")
        at_least_one(channels=channels, image_size=image_size)
        self.channels, self.image_size = channels, image_size
        super().__init__(
            vocabulary=LEVELS,
            max_length=channels * image_size**2,
            absolute=absolute,
            adaptive_cutoffs=None,
            **language,
        )

    @property
    def longest(self) -> int:
        """Number of bytes in an image."""
        return self.channels * self.image_size**2

    def bytes_of(self, images: Tensor) -> Tensor:
        """Converts images (batch, channels, image_size, image_size) to bytes (batch, `longest`)."""
        tensors(images=images)
        shape = (self.channels, self.image_size, self.image_size)
        if images.ndim != 4 or tuple(images.shape[1:]) != shape:
            raise ValueError(
                f"images must be (batch, {', '.join(map(str, shape))}); got {tuple(images.shape)}; "
                "resize them, or build the model for their size"
            )
        whole("images", images, 0, LEVELS - 1, "bytes (255 times an image in [0, 1])")
        return images.permute(0, 2, 3, 1).flatten(1).long()

    def images_of(self, values: Tensor) -> Tensor:
        """Converts bytes (batch, `longest`) to uint8 images, the inverse of `bytes_of`."""
        grid = (self.image_size, self.image_size, self.channels)
        return values.unflatten(1, grid).permute(0, 3, 1, 2).to(torch.uint8)

    def image_log_likelihood(self, images: Tensor) -> Tensor:
        """Returns log p of each byte given the preceding bytes, in nats: (batch, `longest`).

        Bytes are in the order of `bytes_of`.

        Args:
            images: bytes (batch, channels, image_size, image_size).
        """
        values = self.bytes_of(images)
        before = torch.cat((torch.full_like(values[:, :1], START), values[:, :-1]), dim=1)
        return self.log_likelihood(before, values)

    def _coordinates(self, index: Tensor) -> Tensor:
        if self.stack.position is None or self.stack.position.dim == 1:
            return super()._coordinates(index)
        pixel = index // self.channels
        axes = (pixel // self.image_size, pixel % self.image_size, index % self.channels)
        return torch.stack(axes, dim=-1)
