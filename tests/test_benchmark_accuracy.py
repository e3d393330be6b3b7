"""The benchmarks of accuracy and training measure what they say: laws, oracles, small cases."""

from __future__ import annotations

import math
import statistics
from types import ModuleType

import pytest
import torch
from script_files import SCRIPTS, benchmark
from test_benchmarks import bound, dimers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from kit.rows import Rows, pick, read_csv  # isort: skip
from molflt.attention import FEATURE_MAPS
from molflt.attention.mixing import forms
from molflt.attention.mixing.forms import linear_with_kernel
from molflt.attention.mixing.pairs import Pairs, with_exact_pairs

ROOT = SCRIPTS.parent


def stored(name: str) -> Rows:
    """What the documentation shows."""
    return read_csv(ROOT / "docs" / "results" / f"{name}.csv")


def test_error_of_rows_on_the_sphere_does_not_fall_below_their_bias() -> None:
    sizes = {"features": (16384,), "scales": (0.5,), "samples": 2, "keys": 256, "queries": 256}
    rows = benchmark("features").measure(
        maps=("positive",), projections=("iid", "sphere"), dim=16, **sizes
    )
    iid, sphere = (
        pick(rows, projection=name, quantity="matrix")[0]["mean"] for name in ("iid", "sphere")
    )
    assert sphere > 5 * iid


def test_better_names_where_a_curve_lies_below_another() -> None:
    def curve(*values: float) -> Rows:
        return [{"R": 2.0**i, "mean": value} for i, value in enumerate(values)]

    better = benchmark("norms").better
    assert better(curve(2, 0.5, 0.5, 2), curve(1, 1, 1, 1), "R") == "1.41 to 5.66"
    assert better(curve(2, 2), curve(1, 1), "R") == "nowhere"
    assert better(curve(1, 1), curve(2, 2), "R") == "1 or less to 2 or more"


def test_bounds_hold_where_there_are_any_and_are_sharp_for_a_familys_own_density() -> None:
    script, rows = benchmark("masks"), stored("masks")
    for family in script.FAMILIES:
        ratio = pick(rows, family=family)[0]["largest g/p"]
        if math.isinf(ratio):
            continue
        assert script.share(rows, family) < 1
        assert abs(script.slope(rows, family) + 0.5) < 0.1
        if family in script.OWN:  # light tails: the standard error itself is well known
            assert ratio == 1 and script.share(rows, family) > 0.3
            assert 0.6 < statistics.fmean(script.bias(rows, family)) < 1.5


def test_largest_ratio_of_gaussians_in_closed_form() -> None:
    """A mixture of Gaussians around zero over a wider one is largest at zero."""
    script = benchmark("masks")
    position = script.family("gaussian_basis, σ = 0.25", 1, 1).requires_grad_(False)
    variance = (2 * position.spectrum.log_width.double()).exp()
    at_zero = (2 * math.pi * variance).pow(1.5).mean() * (2 * math.pi * 0.25**2) ** 1.5
    assert script.largest_ratio(position) == pytest.approx(at_zero.item(), rel=1e-3)


def test_scatter_is_the_part_of_the_error_that_directions_make() -> None:
    """Squared error over all pairs >= squared scatter; 0.5 / r is the variance of far pairs."""
    script = benchmark("nodes")
    nodes = script.NODES["gaussian"](heads=64, num_nodes=50, sigma=script.OWN_SIGMA).double()
    found = script.errors(nodes, 10.0, 64, pairs=1000, turned=32)
    assert found["error"] == pytest.approx((0.5 / 50) ** 0.5, rel=0.1)
    assert 0.8 * found["error"] < found["scatter"] < 1.05 * found["error"]


class Leaky(nn.Module):
    """Each atom sees the mean of the whole batch."""

    def forward(self, x: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
        return x + 0.5 * x.mean(dim=0)


def test_the_measure_of_isolation_finds_leaks() -> None:
    row = benchmark("isolation").changes("leaky", Leaky, cases=1, large=40)
    assert min(row["batch"], row["padding"], row["gradient"]) > 1e-3
    assert torch.get_default_dtype() == torch.float32


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return benchmark("kernel_error")


@pytest.fixture(scope="module")
def data(script):
    return script.slabs("CHGNet", script.SAMPLE / "val_id.safetensors", 2)


@pytest.mark.parametrize("placement", ["near field", "near exact"])
def test_outputs_are_those_of_the_linear_form(script, data, placement: str) -> None:
    x, basis = data.positions[1], script.masks()
    mask = script.build(script.Form(placement, "shells", 2, 0.05), basis, data, 0)
    mask.near.exact = placement == "near exact"
    i, j = torch.ones(x.shape[1], x.shape[1]).nonzero().T
    left, right = mask.factors(x)
    pairs = Pairs(torch.zeros_like(i), i, j, x.new_zeros(1, 1))
    pairs = mask.near(pairs, x[0, i] - x[0, j], (left @ right.mT)[0, :, i, j])
    tokens = script.tokens(x, basis, "unit", 0)
    query, key, value = (t.float() for t in tokens[:3])
    phi = script.drawn(mask, "positive", 32, 0)
    exact = None if pairs.exact is None else tuple(t.float() for t in pairs.exact)
    pairs = pairs._replace(weight=pairs.weight.float(), exact=exact)
    sums = linear_with_kernel(phi(query), phi(key), value, (left.float(), right.float()), pairs)
    if mask.near.exact:
        sums = with_exact_pairs(sums, query, key, value, pairs)
    dense = script.output(mask, x, mask.kernel(x), tokens, phi)
    torch.testing.assert_close(dense, sums.ratio().double(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("placement", ["additive", "multiplicative"])
def test_costs_are_the_multiplications_of_the_linear_forms(script, data, placement: str) -> None:
    mask = script.build(script.Form(placement, "shells", 1, 0.03), script.masks(), data, 0)
    atoms, m = 50, 64
    x = torch.randn(1, atoms, 3).double()
    query = torch.randn(1, script.MASKS, atoms, script.DIM)
    factors = tuple(f.float() for f in mask.factors(x))
    additive = placement == "additive"
    width = script.DIM + (2 * mask.nodes if additive else 0)
    phi = FEATURE_MAPS["positive"](width, script.MASKS, m)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        if additive:
            sides = [torch.cat((f, query), dim=-1) for f in factors]
            forms.linear(phi(sides[0]), phi(sides[1]), query)
        else:
            linear_with_kernel(phi(query), phi(query), query, factors)
    counted = counter.get_total_flops() / 2 / atoms / script.MASKS
    assert mask.cost(m, 0.0) == pytest.approx(counted, rel=0.03)
    assert mask.features(mask.cost(m, 9.0), 9.0) == m


def test_rows_have_the_name_of_the_folder_of_their_data(script, tmp_path) -> None:
    (tmp_path / "own").mkdir()
    name = "val_id.safetensors"
    (tmp_path / "own" / name).write_bytes((script.SAMPLE / name).read_bytes())
    for data in (script.SAMPLE, tmp_path / "own"):
        rows = script.measure(data, structures=1, seeds=1, features=(64,), few=True)
        assert {row["slabs"] for row in rows} == {data.name}


def test_fits_recover_functions_in_their_span(script, data) -> None:
    torch.manual_seed(0)
    shells = script.ShellNodes(data.diameter, 0.1, 3, normalized=True).double()
    truth, found = (script.ShellWeights(2, shells.shell_radius).double() for _ in range(2))
    target = script.along(truth, data.distance)
    script.fit(found, target, data.distance, data.share)
    close = {"rtol": 0, "atol": 1e-3 * target.abs().max().item()}
    torch.testing.assert_close(script.along(found, data.distance), target, **close)


def test_labels_of_a_potential_are_relaxed_once_and_compared_by_hand(tmp_path) -> None:
    script, cache = benchmark("labels"), tmp_path / "cache.jsonl"
    file, options = bound(tmp_path), {"calculator": "emt", "cache": cache}
    rows = script.measure(file, systems=2, **options)
    before = cache.read_text()
    assert script.measure(file, systems=3, **options)[:2] == rows, "relaxed ones are read"
    assert cache.read_text().startswith(before) and len(cache.read_text().splitlines()) == 3
    cache.write_text(f"{before}{before[:30]}")  # stopped while it was written
    assert script.measure(file, systems=2, **options) == rows and cache.read_text() == before
    file.write_text(file.read_text().replace("y_relaxed=2.0", "y_relaxed=2.5"))  # names stay
    script.measure(file, systems=1, **options)
    assert len(cache.read_text().splitlines()) == 3
    made = [
        {"adsorbate": name, "dft": dft, "energy": energy}
        for name, dft, energy in (("A", 0, 1), ("A", 1, 2), ("B", 0, 0), ("B", 2, 1))
    ]
    found = script.agreement(made)
    assert found["systems"] == 4 and found["MAE"] == 0.75 and found["mean error"] == 0.25
    assert found["MAE within"] == 0.25  # 0 of A; half an eV less of B, either side of its mean
    with pytest.raises(ValueError, match="must be one of emt, chgnet; got dft"):
        script.measure(file, calculator="dft")


def test_adsorbates_of_few_systems_are_in_a_line_of_their_own() -> None:
    script = benchmark("labels")
    made = [("A", 0, 1), ("A", 1, 2), ("A", 2, 3), ("B", 0, 2), ("B", 1, 1), ("C", 2, 0)]
    rows = [
        {"adsorbate": name, "dft": dft, "energy": energy, "converged": True}
        for name, dft, energy in made
    ]
    assert script.table(rows).splitlines()[2:] == [
        "| A | 3 | 1.00 | 1.00 | 1.00 | 1.00 | 0.00 |",
        "| others | 3 | -1.00 | 1.33 | 0.00 | -1.00 | 0.67 |",
        "| all | 6 | 0.00 | 1.17 | 0.50 | 0.60 | 0.33 |",
    ]
    assert script.table(rows[:1]).splitlines()[2] == "| others | 1 | – | 1.00 | 1.00 | – | 0.00 |"


def test_sums_extrapolate_a_coulomb_law_that_message_passing_does_not_see(tmp_path) -> None:
    script = benchmark("long_range")
    training, test = (script.read(dimers(tmp_path), split, 9) for split in ("train", "test"))
    model = script.train("sum, free", training, steps=200, seed=0)
    local = script.train("local", training, steps=1, seed=0)
    with torch.no_grad():
        error = (script.binding(model, test.graphs) - test.energy).abs().mean()
        alone = script.binding(local, test.graphs)
    # Measured 0.06 to 0.07 with seeds 0 to 2; message passing has 1, the last in training 0.16.
    assert error < 0.12 * test.energy.abs().mean() and alone.abs().max() < 1e-5
    rows = script.measure(tmp_path, ("local",), steps=1, seeds=1)
    # mean of 14.4 / r at 13, 14, 15 Å, and of its difference to the last one trained on, meV
    found = script.references(rows)
    for name, error in (("energy 0", 1032.1), ("last in training", 167.9)):
        assert script.errors(found, name, "test")["CC"] == [pytest.approx(error, abs=0.1)]


def test_charges_fitted_to_near_ions_are_those_of_far_ones(tmp_path) -> None:
    """Energies of known charges with all their images; and the potential says what was fitted."""
    script = benchmark("dimers")
    data = script.read(dimers(tmp_path))
    kernels = script.laws(data.graphs, (1,))
    charges = [(graph.atomic_numbers == 11) * 1.5 - 0.5 for graph in data.graphs]  # 1, -0.5, -0.5
    true = [q.double() @ law[0] @ q.double() / 2 for q, law in zip(charges, kernels, strict=True)]
    data = data._replace(energy=data.binding(torch.stack(true)))
    setting = script.Setting((1,), 16, 1e-3, 1e-8)
    model = script.potential(setting, 0)
    design = script.Design.of(model, data, kernels)
    weights = script.fitted(model, design, data, setting, ~data.test, 60)
    guess = design(*weights)
    assert data.relative(guess, data.test) < 1e-3
    torch.testing.assert_close(script.predicted(model, data, *weights), guess, rtol=0, atol=1e-8)
    assert data.held_out(2).sum() == 2 and not (data.held_out(2) & data.test).any()
