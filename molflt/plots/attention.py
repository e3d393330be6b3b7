"""Figures of matrices: attention with one panel per head, and similarities of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from molflt.plots.figure import DPI, ZERO, head_panels, panels

if TYPE_CHECKING:
    import torch
    from matplotlib.colors import Colormap, Normalize

_MAX_PIXELS = 512  # maximum number of pixels along each side of a heat map
_LOG_RANGE = 1e4  # ratio of the largest to the smallest weight on a logarithmic color scale
_MAX_NAMES = 32  # maximum number of token names along an axis
_NAME = 0.14  # space for each token name in inches
_USUAL = 0.99  # fraction of signed weights within the color scale if outliers exist

_Array = NDArray[np.float64]


def attention_matrices(
    weights: ArrayLike | torch.Tensor,
    file: Path,
    *,
    title: str | None = None,
    tokens: tuple[Sequence[str], Sequence[str]] | None = None,
) -> None:
    """Draws the attention matrix of each head, as in fig. 5 of FLT (arXiv:2302.01925).

    All heads share one color scale, which is logarithmic over up to four decades if all weights are
    nonnegative and the largest is at least 30 times the median. Weights of exactly 0, such as those
    of masked keys, are gray. If some weights are negative, which is possible with signed features,
    the scale is diverging and centered at 0, and excludes the largest 1 % of the weights if they
    are outliers. Matrices with more than 512 queries or keys are averaged over blocks. The figure
    states whether weights are excluded or averaged.

    Args:
        weights: attention weights (heads, queries, keys), such as the result of
            `Attention.weights` for one sequence.
        title: title of the figure, such as the name of the layer.
        tokens: names of the queries and of the keys, shown if both contain at most 32 tokens.
    """
    import torch
    from torch.nn.functional import avg_pool2d

    matrices = torch.as_tensor(weights, dtype=torch.float64).detach().cpu()
    heads, queries, keys = matrices.shape
    named = tokens if tokens is not None and max(map(len, tokens)) <= _MAX_NAMES else None
    step = -(-queries // _MAX_PIXELS), -(-keys // _MAX_PIXELS)
    pixels = avg_pool2d(matrices, step, ceil_mode=True).numpy()  # the last blocks may be smaller
    norm, colors, name, extend = _weight_colors(pixels)
    notes = [title] if title else []
    if beyond := float((np.abs(pixels) > norm.vmax).mean()):
        notes.append(f"{100 * beyond:.1g} % of the pixels are beyond the color scale")
    if max(step) > 1:
        notes.append(f"each pixel is the mean over {step[0]} queries × {step[1]} keys")
    # One dot per pixel, because a lower resolution would skip pixels.
    side = max(max(pixels.shape[1:]) * (_NAME if named else 1 / DPI), 2.2) + 0.2
    more = 0.5 if named else 0.0
    size, margin = (side, side + 0.15), (1.7 + more, 0.8 + more + 0.2 * len(notes))
    extent = (-0.5, step[1] * pixels.shape[2] - 0.5, step[0] * pixels.shape[1] - 0.5, -0.5)
    with head_panels(file, heads, size, margin) as (figure, all_axes):
        aspect: Literal["equal", "auto"] = "equal" if 1 / 3 < queries / keys < 3 else "auto"
        masked = np.ma.masked_where((pixels == 0) & (pixels.min() >= 0), pixels)
        for axes, one in zip(all_axes, masked, strict=True):
            image = axes.imshow(one, colors, norm, extent=extent, aspect=aspect)
            axes.set(xlim=(-0.5, keys - 0.5), ylim=(queries - 0.5, -0.5))
            if named is None:
                axes.locator_params(nbins=5, integer=True)
            else:
                axes.set_xticks(range(keys), named[1], rotation=90, fontsize="x-small")
                axes.set_yticks(range(queries), named[0], fontsize="x-small")
        bar = figure.colorbar(image, ax=all_axes, extend=extend, aspect=30, fraction=0.05)
        gray = "; gray: 0" if np.ma.is_masked(masked) else ""
        bar.set_label(f"attention weight, {name} scale{gray}")
        figure.supxlabel("key")
        figure.supylabel("query")
        if notes:
            figure.suptitle("\n".join(notes))


def _weight_colors(pixels: _Array) -> tuple[Normalize, Colormap, str, str]:
    """Returns the norm and the color map for weights, the name of the scale, and `extend`."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, Normalize

    most = float(np.abs(pixels).max()) or 1.0
    if (pixels < 0).any():
        usual = float(np.quantile(np.abs(pixels), _USUAL))
        outliers = 0 < usual < most / 3  # in rows with normalizers near 0
        limit, ends = (usual, "both") if outliers else (most, "neither")
        return Normalize(-limit, limit), colormaps["RdBu_r"], "linear", ends
    colors = colormaps["viridis"].with_extremes(bad=ZERO)
    positive = pixels[pixels > 0]
    if positive.size and most >= 30 * float(np.median(positive)):
        least = float(positive.min())
        low = max(least, most / _LOG_RANGE)
        ends = "min" if least < low else "neither"
        return LogNorm(low, most), colors, "logarithmic", ends
    return Normalize(0.0, most), colors, "linear", "neither"


def substitutions(tables: Mapping[str, _Array], letters: str, file: Path) -> None:
    """Draws similarity tables (letters, letters), keyed by title, without their diagonals."""
    count = len(tables)
    with panels(file, count, count, (4.4, 3.9), (0.6, 0.0)) as (figure, all_axes):
        for axes, (title, table) in zip(all_axes, tables.items(), strict=True):
            image = axes.imshow(np.where(np.eye(len(letters)), np.nan, table), cmap="viridis")
            axes.set_xticks(range(len(letters)), letters, fontsize="x-small")
            axes.set_yticks(range(len(letters)), letters, fontsize="x-small")
            axes.set_title(title)
            figure.colorbar(image, ax=axes, fraction=0.05)
