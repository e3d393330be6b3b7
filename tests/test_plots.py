from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.text import Text

from molflt import plots
from molflt.attention.layer import Attention
from molflt.attention.nodes.random import GaussianNodes
from molflt.attention.positions import SpectralPosition, ToeplitzPosition
from molflt.attention.spectra import GaussianBasis, GaussianMixture, Local
from molflt.evaluation.common import draw_encoding
from molflt.plots import figure
from molflt.tasks.is2re import IS2RETask
from molflt.tasks.optimizers import OptimizerTask

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def figures(monkeypatch) -> list:
    drawn: list = []
    original = figure.picture

    @contextmanager
    def remember(png, **options):
        with original(png, **options) as made:
            drawn.append(made)
            yield made

    monkeypatch.setattr(figure, "picture", remember)
    return drawn


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(PNG) and path.stat().st_size > 5000


def texts(drawn) -> list[str]:
    return [text.get_text() for axes in drawn.axes for text in axes.texts]


def visible(drawn) -> list:
    return [axes for axes in drawn.axes if axes.get_visible()]


def spectral(family, heads: int, dim: int, **options) -> SpectralPosition:
    position = SpectralPosition(family(heads, 4, dim, **options), GaussianNodes(heads, 4, dim))
    return position.double()


def test_training_curve(tmp_path: Path, figures) -> None:
    rows = ["step,lr,train_loss,train_mae_eV,val_mae_eV,val_ewt_percent"]
    rows += [f"{s},{1e-3 - 1e-6 * s},{50 / s},{10 / s},," for s in range(10, 110, 10)]
    rows.insert(6, "50,,,,0.31,2.5")
    rows += ["100,,,,0.42,1.5", "110,0.0"]  # the last row is still being written
    (tmp_path / "metrics.csv").write_text("\n".join(rows))
    png = tmp_path / "deep" / "curve.png"
    plots.training_curve(tmp_path / "metrics.csv", png, IS2RETask.metrics, ("mae_eV", 50))
    assert is_picture(png)
    axes = figures[0].axes
    assert [a.get_ylabel() for a in axes] == ["loss", "MAE / eV", "EwT / %", "learning rate"]
    assert "best: 0.310 eV at step 50" in [text.get_text() for text in axes[1].get_legend().texts]
    validation = axes[1].lines[-2]
    np.testing.assert_allclose(validation.get_xdata(), [50, 100])
    np.testing.assert_allclose(validation.get_ydata(), [0.31, 0.42])


def test_losses_are_means_over_the_known_tokens_of_each_bin(tmp_path: Path, figures) -> None:
    loss = np.array([[4.0, 2.0, 1.0, np.nan], [2.0, np.nan, 3.0, np.nan]])
    plots.losses_by_place({"text": loss}, tmp_path / "losses.png")
    ((line,), (axes,)) = figures[0].axes[0].lines, visible(figures[0])
    np.testing.assert_allclose(line.get_ydata(), [3.0, 2.0, 2.0, np.nan])
    assert axes.get_xscale() == "log"


def test_negative_metrics_are_inside_the_axes(tmp_path: Path, figures) -> None:
    text = "step,train_loss,val_mean_log_loss\n100,-0.5,-1.0\n200,-0.8,-2.0\n"
    (tmp_path / "metrics.csv").write_text(text)
    plots.training_curve(tmp_path / "metrics.csv", tmp_path / "c.png", OptimizerTask.metrics)
    _, axes = figures[0].axes
    low, high = axes.get_ylim()
    assert low < -2.0 and high > -1.0


def test_runs_without_finite_values_have_no_curves(tmp_path: Path) -> None:
    diverged = {"step": np.arange(2.0), "val_mae_eV": np.full(2, np.nan)}
    metrics = {"val_mae_eV": IS2RETask.metrics["mae_eV"]}
    assert not plots.overlaid_curves({"run": diverged}, metrics, tmp_path / "none.png")


def test_parity(tmp_path: Path, figures) -> None:
    target = np.linspace(-4.0, 1.0, 500)
    energy = target + 0.25
    energy[0] = 500.0  # one wild prediction must not squeeze all other points into a line
    plots.parity({"val_id": (target, energy), "val_ood_ads": (target, target)}, tmp_path / "p.png")
    first, second = figures[0].axes
    mae = (499 * 0.25 + 504.0) / 500
    assert first.get_title() == f"val_id: MAE {mae:.3f} eV (n = 500)"
    assert first.get_xlim() == first.get_ylim() == second.get_xlim()
    assert first.get_xlim()[0] > -5 and first.get_xlim()[1] < 2
    assert texts(figures[0]) == ["1 outside"]


def test_parity_names_the_largest_errors(tmp_path: Path, figures) -> None:
    target = np.linspace(-4.0, 1.0, 50)
    energy = target.copy()
    energy[[40, 41, 42, 7]] += [-1.5, -1.4, -1.3, 0.2]  # three neighbors and another point
    names = [f"sid {i} $C$" for i in range(50)]
    plots.parity({"val_id": (target, energy)}, tmp_path / "p.svg", {"val_id": names})
    assert (tmp_path / "p.svg").read_bytes().startswith(b"<?xml")
    (axes,) = figures[0].axes
    _, *worst = axes.get_xlabel().splitlines()
    assert [line.split(" \\$C")[0] for line in worst] == ["1: sid 40", "2: sid 41", "3: sid 42"]
    assert texts(figures[0]) == ["1", "2", "3"]
    figures[0].canvas.draw()
    found = [Text.get_window_extent(text) for text in axes.texts]  # without arrows
    assert not any(one.overlaps(other) for i, one in enumerate(found) for other in found[:i])


def test_attention_matrices_show_the_weights(tmp_path: Path, figures) -> None:
    position = spectral(GaussianMixture, 6, 1, amplitude=1.0)
    layer = Attention(24, 6, mixing="softmax", causal=True, position=position).double()
    r = torch.arange(9, dtype=torch.float64)[None, :, None]
    x = torch.randn(1, 9, 24, dtype=torch.float64)
    weights = layer.weights(x, r)[0]
    plots.attention_matrices(weights, tmp_path / "a.png", title="layer 1")
    assert is_picture(tmp_path / "a.png")
    *heads, _ = visible(figures[0])
    for axes, expected in zip(heads, weights.detach().numpy(), strict=True):
        (image,) = axes.images
        shown = image.get_array()
        np.testing.assert_array_equal(shown.filled(0.0), expected)
        np.testing.assert_array_equal(shown.mask, np.triu(np.ones((9, 9), bool), 1))
        assert image.get_clim() == (0.0, weights.max().item())  # the same for all heads
        assert image.get_extent() == [-0.5, 8.5, 8.5, -0.5]
        assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first query on top


def test_large_attention_matrices_are_averaged_over_blocks(tmp_path: Path, figures) -> None:
    queries, keys = 1100, 700
    weights = np.zeros((1, queries, keys))
    spikes = [(0, 0), (601, 333), (1099, 699), (1097, 698)]
    for query, key in spikes:
        weights[0, query, key] = 0.6
    plots.attention_matrices(weights, tmp_path / "a.png", title="first layer")
    (image,) = figures[0].axes[0].images
    shown = image.get_array().filled(0.0)
    assert shown.shape == (367, 350)  # blocks of 3 x 2; the last has 2 queries
    assert "3 queries × 2 keys" in figures[0].get_suptitle()
    expected = np.zeros_like(shown)
    for query, key in spikes:
        expected[query // 3, key // 2] += 0.6 / (2 * (2 if query >= 1098 else 3))
    np.testing.assert_allclose(shown, expected, atol=1e-15)
    assert image.get_extent() == [-0.5, 699.5, 1100.5, -0.5]
    axes = figures[0].axes[0]
    dots = axes.get_window_extent().height / figures[0].dpi * figure.DPI
    assert dots > 0.9 * len(shown)


def test_rpe_profiles(tmp_path: Path, figures) -> None:
    heads = 5
    position = SpectralPosition(GaussianBasis(heads, 8), GaussianNodes(heads, 4))
    encoding = SimpleNamespace(position=position, radial_profile=position.radial_profile)
    plots.rpe_profiles(encoding, tmp_path / "f.png")
    assert is_picture(tmp_path / "f.png")
    shown = visible(figures[0])
    assert len(shown) == heads
    curve = shown[-1].lines[1]
    r = torch.as_tensor(curve.get_xdata(), dtype=torch.float32)
    assert r.max() == 8.0
    torch.testing.assert_close(
        torch.as_tensor(curve.get_ydata()).float(), position.radial_profile(r)[-1].detach()
    )


@pytest.mark.parametrize("dim", [1, 2])
def test_one_token_has_no_offsets(dim, tmp_path: Path) -> None:
    position = SpectralPosition(GaussianBasis(2, dim=dim), None)
    for tokens in (1, 2):
        draw_encoding(position, 1.0, tokens, tmp_path / f"{tokens}.png")
    assert [path.name for path in tmp_path.iterdir()] == ["2.png"]


def test_rpe_curves_have_offsets_of_both_signs(tmp_path: Path, figures) -> None:
    position = spectral(GaussianMixture, 5, 1, asymmetric=True)
    plots.rpe_curves(position, tmp_path / "c.png", 6)
    assert is_picture(tmp_path / "c.png")
    for head, axes in enumerate(visible(figures[0])):
        x, y = axes.lines[-1].get_data()
        assert set(range(-6, 7)) <= set(np.round(x, 9)) and x.min() == -6 and x.max() == 6
        query = torch.zeros(1, 1, 1, dtype=torch.float64)
        key = torch.as_tensor(-x)[None, :, None]
        expected = position("softmax", query, key).bias[0, head, 0].detach()
        np.testing.assert_allclose(y, expected, atol=1e-12)
        assert np.abs(y - y[::-1]).max() > 0.01  # not even


def test_rpe_surfaces(tmp_path: Path, figures) -> None:
    position = spectral(Local, 3, 2, amplitude=1.0, per_axis=True)
    with torch.no_grad():
        position.spectrum.log_radius[..., 0] += 0.3  # boxes longer along the first axis
    plots.rpe_surfaces(position, tmp_path / "s.png", 8)
    assert is_picture(tmp_path / "s.png")
    *heads, _ = visible(figures[0])
    ends = torch.linspace(-8, 8, 129, dtype=torch.float64)
    delta = torch.cartesian_prod(ends, ends)[None]
    expected = position.bias(delta[:, None])[0, :, 0].detach().numpy().reshape(3, 129, 129)
    most = np.abs(expected).max()
    for axes, surface in zip(heads, expected, strict=True):
        (image,) = axes.images
        np.testing.assert_allclose(image.get_array(), surface, atol=1e-12)
        assert image.get_clim() == pytest.approx((-most, most), rel=1e-12)
        # the middles of the outer pixels are at the ends, and the first axis points down
        assert image.get_extent() == pytest.approx([-8.0625, 8.0625, 8.0625, -8.0625])


def test_tables_are_drawn_reversed(tmp_path: Path, figures) -> None:
    """Tables contain b at j - i; pictures show f(r_i - r_j)."""
    line, plane = ToeplitzPosition(2, max_tokens=7, std=1.0), ToeplitzPosition(2, shape=(4, 4))
    plots.rpe_curves(line, tmp_path / "c.png", 6)
    y = figures[0].axes[1].lines[-1].get_ydata()
    np.testing.assert_array_equal(y, line.table[1].flip(0).detach().double())
    plots.rpe_surfaces(plane, tmp_path / "s.png", 3)
    shown = figures[1].axes[1].images[0].get_array()
    np.testing.assert_array_equal(shown, plane.table[1].flip(0, 1).detach().double())


def test_calibration_shows_coverage_and_binned_errors(tmp_path: Path, figures) -> None:
    error, spread = np.random.default_rng(0).gamma(1.0, size=(2, 100))
    levels = np.array([0.2, 0.5, 0.9])
    covered = {"val_id": (levels, levels / 2), "val_ood_ads": (levels, levels)}
    errors = {"val_id": (spread, error), "val_ood_ads": (spread[:9], error[:9])}
    plots.calibration(covered, errors, 0.68, tmp_path / "u.png")
    assert is_picture(tmp_path / "u.png")
    left, right = figures[0].axes
    lines = {line.get_label(): line for line in left.lines}
    np.testing.assert_allclose(lines["val_id (n = 100)"].get_ydata(), [10, 25, 45])
    bins = {line.get_label(): line.get_xydata() for line in right.lines}
    assert len(bins["val_id"]) == 4 and len(bins["val_ood_ads"]) == 1  # 25 systems in each
    lowest = np.argsort(spread)[:25]
    expected = [spread[lowest].mean(), np.quantile(error[lowest], 0.68)]
    np.testing.assert_allclose(bins["val_id"][0], expected)
