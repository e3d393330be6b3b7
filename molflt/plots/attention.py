"""Figures of attention and relative encodings by head, and of similarities of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from molflt.plots.figure import BLUE, DPI, GREY, ZERO, head_panels, panels

if TYPE_CHECKING:
    import torch
    from matplotlib.colors import Colormap, Normalize

_MAX_PIXELS = 512  # maximum number of pixels along each side of a heat map
_LOG_RANGE = 1e4  # ratio of the largest to the smallest weight on a logarithmic color scale
_MAX_NAMES = 32  # maximum number of token names along an axis
_NAME = 0.14  # space for each token name in inches
_USUAL = 0.99  # fraction of signed weights within the color scale if outliers exist
_FARTHEST = 8.0  # largest distance between atoms, in Å
_DEPTH = 12.0  # a curve ends this far below its largest value
_POINTS = 129  # number of values along each axis of a surface, unless it is on a grid

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


def has_bias(position: torch.nn.Module | None) -> bool:
    """Returns True if a position module adds a bias to the logits; only a bias can be drawn.

    Rotations and stochastic encodings modify queries and keys instead.
    """
    if position is None:
        return False
    module: Any = position
    origin = _like(module).new_zeros(1, 1, module.dim)
    return "softmax" in module.mixings and module("softmax", origin, origin).bias is not None


def rpe_profiles(encoding: Any, file: Path) -> None:
    """Draws the learned relative encoding f(r) of each head on a separate scale.

    Softmax attention adds f(r) to its logits; linear attention adds an estimate of f(r). If a
    kernel multiplies the attention weights, its logarithm is drawn. A curve ends where it is 12
    below its largest value, which corresponds to a factor of 1e5 in the weights.

    Args:
        encoding: an encoding of graphs, which may include a near field.
    """
    import torch

    position = encoding.position
    distances = torch.linspace(0.0, _FARTHEST, 321, dtype=torch.float64).to(_like(position))
    profiles = _array(encoding.radial_profile(distances))  # [head, r]
    # Values beyond a cutoff would flatten the rest of the curve.
    profiles = np.where(profiles < profiles.max(axis=1, keepdims=True) - _DEPTH, -np.inf, profiles)
    name, meaning = position.placement
    y_label = f"{name}(r), {meaning}"
    _draw_curves(file, _array(distances), profiles, "distance r / Å", y_label)


def rpe_curves(position: Any, file: Path, max_offset: float, unit: str = "tokens") -> None:
    """Draws the encoding f(r_i - r_j) of positions on a line for offsets of both signs.

    Scales differ between heads. Curves have gaps where f is -inf.

    Args:
        position: a position module of dimension 1.
        max_offset: largest offset between a query and a key, in `unit`; an integer for encodings on
            a grid of tokens.
        unit: unit of positions.
    """
    end = math.ceil(max_offset)
    per_token = math.ceil(400 / end)  # at least 800 intervals, with a point at each integer offset
    (offsets,), curves = _sampled(position, (max_offset,), 2 * end * per_token + 1)
    label = f"offset $r_i - r_j$ / {unit}\n(left: keys after the query; right: before it)"
    marker = "." if len(offsets) <= 65 else ""
    _draw_curves(file, offsets, curves, label, _of_offsets(position), marker)


def _draw_curves(
    file: Path, x: _Array, curves: _Array, x_label: str, y_label: str, marker: str = ""
) -> None:
    sizes = ((2.3, 1.8), (0.6, 0.9), (3.4, 2.9))
    with head_panels(file, len(curves), *sizes, share_y=False) as (figure, all_axes):
        for axes, curve in zip(all_axes, curves, strict=True):
            axes.axhline(0.0, color=GREY, linewidth=0.8)
            if x[0] < 0:
                axes.axvline(0.0, color=GREY, linewidth=0.8)
            axes.plot(x, np.where(np.isfinite(curve), curve, np.nan), color=BLUE, marker=marker)
            axes.margins(x=0.01)
            axes.grid()
        figure.supxlabel(x_label)
        figure.supylabel(y_label)


def rpe_surfaces(position: Any, file: Path, max_offset: float, unit: str = "patches") -> None:
    """Draws the encoding f(r_i - r_j) over the first two axes of the offset, as heat maps.

    Figure 4 of FLT (arXiv:2302.01925) shows such functions as surfaces. All heads share one color
    scale centered at 0, and the titles state the range of each head. Offsets along further axes are
    0. As in images, the first axis points down.

    Args:
        position: a position module of dimension 2 or more.
        max_offset: largest offset along each axis in `unit`; for encodings on a grid of H x H
            tokens, H - 1.
        unit: unit of positions.
    """
    from matplotlib import colormaps

    (line, _), surfaces = _sampled(position, (max_offset, max_offset), _POINTS)
    finite = np.ma.masked_invalid(surfaces)
    most = float(np.abs(finite).max() or 1.0)
    colors = colormaps["RdBu_r"].with_extremes(bad=ZERO)
    end = 1.5 * line[-1] - 0.5 * line[-2]  # outer edge of the pixels
    with head_panels(file, len(surfaces), (2.4, 2.65), (1.7, 0.8)) as (figure, all_axes):
        for head, (axes, surface) in enumerate(zip(all_axes, finite, strict=True)):
            ends = (-end, end, end, -end)
            image = axes.imshow(surface, colors, vmin=-most, vmax=most, extent=ends)
            span = "−∞"
            if np.ma.count(surface):
                span = f"{surface.min():.2g} to {surface.max():.2g}".replace("-", "−")
            axes.set_title(f"head {head}: {span}", fontsize="small")
            axes.locator_params(nbins=5)
        gray = "; gray: −∞" if np.ma.is_masked(finite) else ""
        label = f"{_of_offsets(position)}{gray}"
        figure.colorbar(image, ax=all_axes, label=label, aspect=30, fraction=0.05)
        figure.supxlabel(f"offset along axis 2 / {unit}")
        figure.supylabel(f"offset along axis 1 / {unit}")
        if position.dim > 2:
            figure.suptitle("section at offset 0 along all other axes")


def _of_offsets(position: Any) -> str:
    name, meaning = position.placement
    return f"{name}($r_i - r_j$), {meaning}"


def _like(position: torch.nn.Module) -> torch.Tensor:
    import torch

    tensors = (*position.parameters(), *position.buffers(), torch.empty(0))
    return next(tensor.detach() for tensor in tensors if tensor.is_floating_point())


def _array(values: torch.Tensor) -> _Array:
    return values.detach().cpu().double().numpy()


def _sampled(position: Any, reach: tuple[float, ...], points: int) -> tuple[list[_Array], _Array]:
    """Returns offsets up to `reach` along each axis, and f, of shape (heads, offsets, ...)."""
    import torch

    like = _like(position)
    if position.grid:  # a grid needs all tokens in order; each offset is read from one pair
        shape = tuple(int(end) + 1 for end in reach)
        axes = [np.arange(1.0 - size, size) for size in shape]
        cells = like.new_tensor(np.indices(shape).reshape(len(shape), -1).T[None])
        values = _array(position("softmax", cells, cells).bias)[0]
        offsets = np.stack(np.meshgrid(*axes, indexing="ij")).reshape(len(shape), -1).astype(int)
        queries = np.ravel_multi_index(tuple(np.maximum(offsets, 0)), shape)
        keys = np.ravel_multi_index(tuple(np.maximum(-offsets, 0)), shape)
        values = values[:, queries, keys]
    else:
        lines = [torch.linspace(-end, end, points, dtype=torch.float64).to(like) for end in reach]
        axes = [_array(line) for line in lines]
        delta = like.new_zeros(points ** len(reach), position.dim)
        delta[:, : len(reach)] = torch.cartesian_prod(*lines).view(len(delta), -1)
        origin = delta.new_zeros(1, 1, delta.shape[-1])  # of the query
        values = _array(position("softmax", origin, -delta[None]).bias)[0, :, 0]
    return axes, values.reshape(-1, *map(len, axes))
