"""Figures of relative positional encodings, with one panel per head."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from molflt.plots.figure import BLUE, GREY, ZERO, head_panels

if TYPE_CHECKING:
    import torch

_Array = NDArray[np.float64]

_FARTHEST = 8.0  # largest distance between atoms, in Å
_DEPTH = 12.0  # a curve ends this far below its largest value
_POINTS = 129  # number of values along each axis of a surface, unless it is on a grid


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
