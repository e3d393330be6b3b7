"""scripts/approximation.py: its measurements at tiny sizes obey the theorems they illustrate."""

import csv
import math
import statistics
from pathlib import Path

import pytest
import torch
from script_files import load_script

UNIFORM = "uniform attention"
OWN = ("gaussian, own nodes", "laplace, own nodes", "matern, own nodes")
FINITE = (*OWN, "smooth_local, Laplace nodes")


@pytest.fixture(scope="module")
def script():
    return load_script("approximation")


@pytest.fixture(scope="module")
def out(script, tmp_path_factory) -> Path:
    threads = torch.get_num_threads()
    folder = tmp_path_factory.mktemp("approximation")
    assert script.main(["--quick", "--out", str(folder)]) == 0
    torch.set_num_threads(threads)
    return folder


def points(out: Path, figure: str, **labels: str) -> list[dict[str, str]]:
    """Rows of a figure's CSV with these labels."""
    with (out / f"{figure}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if all(row[key] == value for key, value in labels.items())]


def means(rows: list[dict[str, str]]) -> list[float]:
    return [float(row["mean"]) for row in rows]


def slope(rows: list[dict[str, str]], x: str) -> float:
    places = [math.log(float(row[x])) for row in rows]
    return statistics.linear_regression(places, [math.log(m) for m in means(rows)]).slope


def test_every_figure_is_written_in_full(script, out) -> None:
    text = (out / "approximation.md").read_text()
    for figure in script.FIGURES:
        assert (out / f"{figure}.png").stat().st_size > 10_000
        assert f"### {figure}" in text
        rows = points(out, figure)
        assert {"mean", "sd", "samples"} <= rows[0].keys()
        assert all(not math.isnan(float(row["mean"])) for row in rows)


@pytest.mark.parametrize("feature_map", ["positive", "trigonometric", "favor2020"])
def test_squared_error_of_the_matrix_falls_as_one_over_features(out, feature_map) -> None:
    labels = {"feature_map": feature_map, "quantity": "matrix"}
    assert slope(points(out, "features", **labels, projection="iid"), "m") == pytest.approx(
        -1, abs=0.15
    )


@pytest.mark.parametrize("feature_map", ["positive", "trigonometric", "favor2020"])
@pytest.mark.parametrize("projection", ["orthogonal", "hadamard", "givens"])
def test_orthogonal_rows_are_better_than_independent_ones(out, feature_map, projection) -> None:
    labels = {"feature_map": feature_map, "quantity": "matrix"}
    iid = means(points(out, "features", **labels, projection="iid"))
    structured = means(points(out, "features", **labels, projection=projection))
    ratio = statistics.geometric_mean(a / b for a, b in zip(structured, iid, strict=True))
    assert ratio < (0.6 if feature_map == "trigonometric" else 0.95)


def test_error_of_rows_on_the_sphere_does_not_fall_below_their_bias(script, monkeypatch) -> None:
    monkeypatch.setattr(script, "MAPS", ("positive",))
    projections = {name: script.PROJECTIONS[name] for name in ("iid", "sphere")}
    monkeypatch.setattr(script, "PROJECTIONS", projections)
    sizes = {"dim": 16, "keys": 256, "queries": 256, "samples": 2, "scales": [0.5]}
    generator = torch.Generator().manual_seed(0)
    rows = script.features({**sizes, "features": [16384]}, generator)
    iid, sphere = (
        script.report.pick(rows, projection=name, quantity="matrix")[0]["mean"]
        for name in projections
    )
    assert sphere > 5 * iid


def test_errors_grow_with_layers_and_fall_with_features(out) -> None:
    for feature_map in ("positive", "trigonometric"):
        curves = {
            m: means(points(out, "layers", feature_map=feature_map, gain="1", m=m))
            for m in ("16", "256", UNIFORM)
        }
        assert all(sorted(curve) == curve for curve in curves.values())
        assert curves["256"][-1] < 0.5 * curves["16"][-1]
        assert curves["256"][-1] < curves[UNIFORM][-1]


def test_large_norms_make_the_estimate_worse_than_uniform_attention(out) -> None:
    for feature_map in ("positive", "trigonometric"):
        uniform = means(points(out, "norms", feature_map=feature_map, m=UNIFORM))
        assert sorted(uniform) == uniform
        for m in ("4", "64"):
            assert means(points(out, "norms", feature_map=feature_map, m=m))[-1] > uniform[-1]
    few, many = (means(points(out, "norms", feature_map="positive", m=m)) for m in ("4", "64"))
    assert all(0 <= error <= 2 for error in few + many)  # both are distributions
    assert many[0] < 0.4 * few[0] and many[-1] > 0.7 * few[-1]


@pytest.mark.parametrize("family", FINITE)
def test_masks_are_unbiased_and_their_error_falls_as_one_over_root_nodes(out, family) -> None:
    assert slope(points(out, "masks", family=family, quantity="rms error"), "r") == pytest.approx(
        -0.5, abs=0.1
    )
    bias, error = (
        means(points(out, "masks", family=family, quantity=name))
        for name in ("bias", "standard error of bias")
    )
    ratios = [a / b for a, b in zip(bias, error, strict=True)]
    assert max(ratios) < 3
    if family in OWN:  # light tails: the standard error itself is well known
        assert 0.6 < statistics.fmean(ratios) < 1.5


@pytest.mark.parametrize("family", FINITE)
def test_bound_holds(out, family) -> None:
    rows = points(out, "masks", family=family, quantity="largest error")
    bound = means(points(out, "masks", family=family, quantity="bound, 95 %"))
    upper = [float(row["mean"]) + 2 * float(row["sd"]) for row in rows]
    assert all(a < b for a, b in zip(upper, bound, strict=True))
    if family in OWN:  # the density for which the theorem is sharpest
        assert {row["largest g/p"] for row in rows} == {"1"}
        assert all(a > 0.3 * b for a, b in zip(means(rows), bound, strict=True))


def test_boxes_have_no_bound_and_no_square_root_law(out) -> None:
    rows = points(out, "masks", family="local, σ = 0.25", quantity="rms error")
    assert slope(rows, "r") > -0.35
    bound = points(out, "masks", family="local, σ = 0.25", quantity="bound, 95 %")
    assert all(math.isinf(value) for value in means(bound))


def test_largest_ratio_of_gaussians_in_closed_form(script) -> None:
    """A mixture of Gaussians around zero over a wider one is largest at zero."""
    position = script.mask_family("gaussian_basis, σ = 0.25", 1, 1).requires_grad_(False)
    variance = (2 * position.spectrum.log_width.double()).exp()
    at_zero = (2 * math.pi * variance).pow(1.5).mean() * (2 * math.pi * 0.25**2) ** 1.5
    assert script.largest_ratio(position) == pytest.approx(at_zero.item(), rel=1e-3)


def test_better_names_where_a_curve_lies_below_another(script) -> None:
    def curve(*values: float) -> list[dict[str, float]]:
        return [{"R": 2.0**i, "mean": value} for i, value in enumerate(values)]

    report = script.report
    assert report.better(curve(2, 0.5, 0.5, 2), curve(1, 1, 1, 1), "R") == "1.41 to 5.66"
    assert report.better(curve(2, 2), curve(1, 1), "R") == "nowhere"
    assert report.better(curve(1, 1), curve(2, 2), "R") == "<= 1 to >= 2"
