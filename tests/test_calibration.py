"""Calibrated uncertainty of ensembles: coverage of errors from known distributions, files."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from molflt import plots
from molflt.evaluation.calibration import LEVEL, Calibration, conformal_factor, is_set_aside

NEW = 5000
MEMBERS = ("a" * 64, "b" * 64)


def drawn(kind: str, n: int, seed: int, follows: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Draws errors of varying scale, eV, and spreads of four members of half that scale."""
    draw = np.random.default_rng(seed)
    size = np.exp(draw.normal(-2.5, 0.7, n)) if follows else np.full(n, 0.1)
    unit = draw.normal(size=n) if kind == "normal" else draw.laplace(size=n)
    spread = (0.5 * size[:, None] * draw.normal(size=(n, 4))).std(axis=1, ddof=1)
    return size * unit, spread


def coverage(calibration: Calibration, error: np.ndarray, spread: np.ndarray) -> float:
    return float((np.abs(error) <= calibration.uncertainty(spread)).mean())


@pytest.mark.parametrize("kind", ["normal", "laplace"])
@pytest.mark.parametrize("follows", [True, False])
def test_new_errors_are_covered(kind: str, follows: bool) -> None:
    calibration = Calibration.fit(*drawn(kind, 2000, 0, follows), "val_id", MEMBERS)
    error, spread = drawn(kind, NEW, 1, follows)
    assert coverage(calibration, error, spread) == pytest.approx(LEVEL, abs=0.03)
    uncertainty = calibration.uncertainty(spread)
    if follows:  # also among small and large uncertainties
        for part in np.array_split(np.argsort(uncertainty), 3):
            assert coverage(calibration, error[part], spread[part]) == pytest.approx(LEVEL, abs=0.1)
        assert uncertainty.max() > 5 * uncertainty.min()
    else:  # an uninformative spread has no effect
        assert np.quantile(uncertainty, 0.99) < 1.2 * np.quantile(uncertainty, 0.01)


@pytest.mark.parametrize(("n", "off"), [(20, 0.05), (60, 0.03)])
def test_small_sets_calibrate_on_average(n: int, off: float) -> None:
    """Choosing the floor on the same systems as the factor keeps the coverage."""
    found = []
    for seed in range(100):
        calibration = Calibration.fit(*drawn("laplace", n, seed), "s", MEMBERS)
        found.append(coverage(calibration, *drawn("laplace", 300, seed + 5000)))
    assert np.mean(found) == pytest.approx(LEVEL, abs=off)


def test_the_factor_is_the_conformal_rank() -> None:
    scores = np.random.default_rng(0).permutation(np.arange(1.0, 25.0))  # 25 * 0.68 = 17
    assert conformal_factor(scores) == 17
    assert conformal_factor(scores, 0.7) == 18  # 17.5 is rounded up
    assert conformal_factor(scores, 0.95) == 24


def test_halves_depend_only_on_the_sid() -> None:
    sids = np.arange(100_000, 104_000)
    half = is_set_aside(sids)
    assert half.mean() == pytest.approx(0.5, abs=0.03)
    order = np.random.default_rng(0).permutation(len(sids))[:50]
    assert (is_set_aside(sids[order]) == half[order]).all()
    for step in (2, 3, 7):  # no pattern in the numbers
        assert half[::step].mean() == pytest.approx(0.5, abs=0.06)


def test_picture_shows_coverage_and_binned_errors(tmp_path, monkeypatch) -> None:
    kept = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda f, *a, **k: kept.append(f) or save(f, *a, **k))
    error, spread = drawn("normal", 100, 0)
    levels = np.array([0.2, 0.5, 0.9])
    panels = {"val_id": (levels, levels / 2), "val_ood_ads": (levels, levels)}
    errors = {"val_id": (spread, np.abs(error)), "val_ood_ads": (spread[:9], np.abs(error[:9]))}
    plots.calibration(panels, errors, LEVEL, tmp_path / "u.png")
    assert (tmp_path / "u.png").stat().st_size > 10_000
    left, right = kept[0].axes
    lines = {line.get_label(): line for line in left.lines}
    np.testing.assert_allclose(lines["val_id (n = 100)"].get_ydata(), [10, 25, 45])
    bins = {line.get_label(): line.get_xydata() for line in right.lines}
    assert len(bins["val_id"]) == 4 and len(bins["val_ood_ads"]) == 1  # 25 systems in each
    lowest = np.argsort(spread)[:25]
    expected = [spread[lowest].mean(), np.quantile(np.abs(error)[lowest], LEVEL)]
    np.testing.assert_allclose(bins["val_id"][0], expected)
