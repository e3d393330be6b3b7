import pytest
import torch
from script_files import benchmark
from test_benchmarks import dimers
from torch import nn


def test_scatter_is_the_part_of_the_error_that_directions_make() -> None:
    """The squared error is at least the squared scatter; far pairs have the variance 0.5 / r."""
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


def test_agreement_of_labels_by_hand() -> None:
    """Checks that adsorbates with few systems share a line."""
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


def test_charges_fitted_to_near_ions_are_those_of_far_ones(tmp_path) -> None:
    """Energies are computed from known charges and all images; the potential reproduces the fit."""
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
