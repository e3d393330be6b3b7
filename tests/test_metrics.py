"""Metrics against numbers worked out by hand, and what they refuse."""

from pathlib import Path

import numpy as np
import pytest

from molflt.metrics import EWT_THRESHOLD, energy_mae, energy_mse, energy_within_threshold

METRICS = (energy_mae, energy_mse, energy_within_threshold)
OCP = Path(__file__).resolve().parents[2] / "shared/data/oc20/ocp_predictions"


def test_hand_computed() -> None:
    energy = [1.0, -2.0, 0.5, 3.0]
    target = [1.01, -2.5, 0.5, 2.75]  # errors 0.01, 0.5, 0, 0.25
    assert energy_mae(energy, target) == pytest.approx(0.76 / 4, abs=1e-15)
    assert energy_mse(energy, target) == pytest.approx((0.0001 + 0.25 + 0.0625) / 4, abs=1e-15)
    assert energy_within_threshold(energy, target) == 0.5


def test_threshold_is_strict() -> None:
    """An error of exactly 0.02 eV is not within the threshold; the next smaller number is."""
    assert EWT_THRESHOLD == 0.02
    edge = [0.02, -0.02, np.nextafter(0.02, 0), -np.nextafter(0.02, 0)]
    assert energy_within_threshold(edge, np.zeros(4)) == 0.5


def test_float64_inside() -> None:
    """In float32 the sum of these errors would be off in the fourth digit."""
    energy = np.full(2_000_000, 0.1, dtype=np.float32)
    target = np.zeros(2_000_000, dtype=np.float32)
    assert energy_mae(energy, target) == pytest.approx(float(np.float32(0.1)), rel=1e-12)


@pytest.mark.parametrize("metric", METRICS)
def test_unequal_shapes_are_refused(metric) -> None:
    """(N, 1) against (N,) broadcasts to (N, N), and its mean is a wrong MAE, not an error."""
    energy, target = np.arange(3.0)[:, None], np.arange(3.0)
    assert np.abs(energy - target).mean() > 0.8  # what went unnoticed; the MAE is 0
    with pytest.raises(ValueError, match=r"same shape; got \(3, 1\) and \(3,\)"):
        metric(energy, target)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_is_refused(metric, bad: float) -> None:
    with pytest.raises(ValueError, match=r"energy must be finite.*at index 1 \(1 of 3"):
        metric([0.0, bad, 1.0], [0.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="target must be finite"):
        metric([0.0, 0.0, 1.0], [0.0, 0.0, bad])


@pytest.mark.parametrize("metric", METRICS)
def test_empty_is_refused(metric) -> None:
    with pytest.raises(ValueError, match="at least one system"):
        metric([], [])


def test_real_predictions() -> None:
    """A real ocp file: against itself shifted by a known amount, and rounded to float16."""
    path = OCP / "is2re_predictions_id.npz"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    with np.load(path, allow_pickle=False) as file:
        energy = file["energy"]
    assert energy.shape == (24948,)
    target = energy + np.where(np.arange(len(energy)) % 4 == 0, 0.019, 0.5)
    assert energy_within_threshold(energy, target) == 0.25
    assert energy_mae(energy, target) == pytest.approx(0.25 * 0.019 + 0.75 * 0.5, abs=1e-12)
    half = energy.astype(np.float16)  # what ocp wrote by default costs up to a third of 0.02 eV
    assert 0.005 < np.abs(half - energy).max() < 0.01
    assert energy_mae(half, energy) < 0.001
