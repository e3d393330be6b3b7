"""Vision Transformer for image classification."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from molflt.attention import Attention, Stack
from molflt.attention.checks import (
    at_least_one,
    known_names,
    no_effect,
    one_of,
    readable,
    tensors,
    whole,
)
from molflt.attention.numerics import at_least_float32
from molflt.attention.positions import PositionName, known_options
from molflt.attention.positions.base import ABSOLUTE, sinusoids
from molflt.attention.positions.grid import expect_unit_scale
from molflt.attention.stack import Redrawn

_MARGIN = 0.25  # interpolation and noise may leave [0, 1] by this much


class ImageClassifier(Redrawn):
    """Vision Transformer (ViT) with optional relative encodings of patch positions.

    The model consists of a linear embedding of non-overlapping patches, an absolute encoding of
    their positions, attention blocks with one relative encoding for all layers, and a linear
    classifier of the mean of all tokens (or of a class token). It follows ViT (arXiv:2010.11929),
    section 3.1. Masks learned through their Fourier transform follow FLT's image experiments
    (arXiv:2302.01925); 2-D Toeplitz kernels with the mean of all tokens follow NPRF
    (arXiv:2106.12566), appendix A.4. One layer with several `refinements` corresponds to the
    weight-shared Universal Transformer of FLT v1, fig. 3.

    Two-dimensional relative encodings use (row, column) of each patch relative to the center of the
    image, in units of patches times `position_scale`. One-dimensional encodings, such as that of
    cosFormer, use the index in the sequence of patches, row by row, from 0.

    Args:
        classes: number of classes; inferred from the data if null.
        channels: number of color channels; inferred from the data if null.
        image_size: side length of the square images, in pixels; inferred from the data if null.
        patch_size: side length of a patch, in pixels; a divisor of `image_size`.
        dim: width of tokens.
        dropout: dropout of embedded patches and of blocks.
        pool: input of the classifier: the "mean" of all tokens, or a learned class "token" before
            the first patch. In two dimensions, the class token is at the center of the image.
        absolute: encoding of patch positions: "learned" vectors (ViT, DeiT), "sinusoidal" in rows
            and columns (MAE, arXiv:2111.06377), or "none" for the relative encoding alone.
        position_scale: factor by which two-dimensional positions are multiplied; 1 by default; must
            be 1 for encodings with a table.
        position: "none" or a key of `molflt.attention.POSITIONS`.
        position_options: further arguments of the encoding. Missing options that follow from the
            grid of patches (`dim`, `shape`, `max_tokens`) are added.
        stack: further arguments of `molflt.attention.Stack`.

    Attributes:
        image_mean, image_std: buffers (channels,) that normalize images in [0, 1].
        of_data: prefixes of the names of tensors that depend on the data: the image normalizer and
            the output layer.
    """

    of_data = ("image_mean", "image_std", "head.")

    def __init__(
        self,
        classes: int | None = None,
        channels: int | None = None,
        image_size: int | None = None,
        patch_size: int = 4,
        dim: int = 128,
        dropout: float = 0.0,
        pool: Literal["mean", "token"] = "mean",
        absolute: Literal["none", "sinusoidal", "learned"] = "learned",
        position_scale: float | None = None,
        position: PositionName = "none",
        position_options: dict[str, Any] | None = None,
        **stack: Any,
    ) -> None:
        super().__init__()
        known_names(ImageClassifier, stack, Stack, Attention)
        at_least_one(dim=dim, patch_size=patch_size)
        if classes is None or channels is None or image_size is None:
            raise ValueError(f"expected numbers; got {classes=}, {channels=}, {image_size=}")
        at_least_one(classes=classes, channels=channels, image_size=image_size)
        side, rest = divmod(image_size, patch_size)
        if rest:
            raise ValueError(
                f"{image_size=} must be a multiple of {patch_size=}; choose a divisor, or resize "
                "the images"
            )
        self.classes, self.channels, self.image_size = classes, channels, image_size
        self.patch_size, self.side, self.pool = patch_size, side, pool
        if position == "none":
            no_effect("with position='none'", position_scale=position_scale)
        self.position_scale = 1.0 if position_scale is None else position_scale
        tokens = side * side + (pool == "token")
        options = known_options(position, dim=2, shape=(side, side), max_tokens=tokens)
        requested = position_options or {}
        if "shape" in options:  # a table in two dimensions, or along the sequence if requested
            options.pop("shape" if "max_tokens" in requested else "max_tokens", None)
        options |= requested
        self.stack = Stack(
            dim=dim, dropout=dropout, position=position, position_options=options, **stack
        )
        one_of("pool", pool, ("mean", "token"))
        one_of("absolute", absolute, ABSOLUTE)
        if (encoding := self.stack.position) is not None:
            one_of("position_options dim", encoding.dim, (1, 2))
            if encoding.dim == 1 and self.position_scale != 1:
                why = "in one dimension, where positions are indices"
                no_effect(why, position_scale=self.position_scale)
            if encoding.grid and encoding.dim == 2 and pool == "token":
                raise ValueError(
                    f"{type(encoding).__name__} is a table of the offsets between patches, and "
                    "pool='token' adds a token that is not a patch; use pool='mean', or another "
                    "position"
                )
            expect_unit_scale(encoding, self.position_scale)
        self.embed = nn.Conv2d(channels, dim, patch_size, stride=patch_size)
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, dim)) if pool == "token" else None
        self.place: nn.Parameter | None = None
        if absolute == "learned":
            self.place = nn.Parameter(0.02 * torch.randn(1, side * side, dim))
        self.absolute = absolute
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(dim, classes)
        self.image_mean = nn.Buffer(torch.zeros(channels))
        self.image_std = nn.Buffer(torch.ones(channels))

    def set_normalizer(self, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> None:
        """Sets the mean and standard deviation that normalize images, each of shape (channels,)."""
        self.image_mean.copy_(torch.as_tensor(mean))
        self.image_std.copy_(torch.as_tensor(std))

    def tokens(self, images: Tensor) -> Tensor:
        """Embeds the class token, if any, and the patches row by row: (batch, tokens, dim).

        Args:
            images: images (batch, channels, image_size, image_size) in bytes or in [0, 1].
        """
        tensors(images=images)
        expected = (self.channels, self.image_size, self.image_size)
        if images.ndim != 4 or tuple(images.shape[1:]) != expected or not len(images):
            raise ValueError(
                f"images must be (batch, {', '.join(map(str, expected))}), batch at least 1; got "
                f"{tuple(images.shape)}; resize them, or build the model for their size"
            )
        if not images.is_floating_point():
            whole("images", images, 0, 255, "bytes, or real numbers in [0, 1]")
            images = images.to(self.image_mean.dtype) / 255
        elif readable(images):
            low, high = map(float, images.detach().aminmax())
            if not (low >= -_MARGIN and high <= 1 + _MARGIN):
                raise ValueError(
                    f"images in floating point must be in [0, 1]; got {low:.4g} to {high:.4g}; "
                    "divide bytes by 255, and leave the normalization to the model"
                )
        mean, std = self.image_mean[:, None, None], self.image_std[:, None, None]
        patches = self.embed(((images - mean) / std).to(self.embed.weight.dtype))
        x: Tensor = patches.flatten(2).transpose(1, 2)
        if self.absolute == "sinusoidal":
            x = x + _sinusoids(self.side, x.shape[-1]).to(self.embed.weight)
        elif self.place is not None:
            x = x + self.place
        if self.class_token is not None:
            x = torch.cat((self.class_token.expand(len(x), -1, -1).to(x.dtype), x), dim=1)
        return self.dropout(x)

    @property
    def places(self) -> Tensor:
        """Rows and columns of patches relative to the image center, of shape (1, tokens, 2).

        For one-dimensional encodings: indices 0, 1, 2, ... of tokens, of shape (1, tokens, 1).
        """
        axes = 2 if self.stack.position is None else self.stack.position.dim
        tokens = self.side**2 + (self.class_token is not None)
        index = torch.arange(tokens, dtype=torch.float64, device="cpu")
        if axes == 1:
            return index[None, :, None]
        line = index[: self.side] - (self.side - 1) / 2
        grid = torch.cartesian_prod(line, line)
        return torch.cat((grid.new_zeros(tokens - len(grid), 2), grid))[None]

    @property
    def positions(self) -> Tensor:
        """Positions for the relative encoding: `places`, scaled if they are two-dimensional."""
        places = self.places
        scale = self.position_scale if places.shape[-1] == 2 else 1.0
        return (places * scale).to(at_least_float32(self.embed.weight))

    def forward(self, images: Tensor) -> Tensor:
        """Returns the class logits, of shape (batch, classes); see `tokens` for the images."""
        positions = None if self.stack.position is None else self.positions
        x = self.stack(self.tokens(images), positions)
        pooled = x.mean(dim=1) if self.pool == "mean" else x[:, 0]
        with torch.autocast(pooled.device.type, enabled=False):  # logits in bfloat16 are often tied
            return self.head(pooled.to(self.head.weight.dtype))

    def extra_repr(self) -> str:
        return f"image_size={self.image_size}, patch_size={self.patch_size}, pool={self.pool!r}"


def _sinusoids(side: int, dim: int) -> Tensor:
    """Returns sines and cosines of row and column indices (arXiv:1706.03762, section 3.5)."""
    line = sinusoids(torch.arange(side, device="cpu"), (dim + 1) // 2)
    axes = line.repeat_interleave(side, dim=0), line.repeat(side, 1)
    return torch.cat(axes, dim=-1)[None, :, :dim]
