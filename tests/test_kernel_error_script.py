"""scripts/kernel_error.py: its forms are the package's, and its costs are what they compute."""

import csv
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from torch_geometric.data import Batch, Data

from molflt.attention import mixing
from molflt.attention.encoding import Pairs
from molflt.attention.feature_maps import FEATURE_MAPS
from molflt.attention.multiplicative import linear_with_kernel, with_exact_pairs
from molflt.graph.neighbors import neighbor_list

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))
    try:
        import kernel_error
    finally:
        sys.path.remove(str(SCRIPTS))
    return kernel_error


@pytest.fixture(scope="module")
def data(script):
    return script.slabs("EMT", script.SAMPLE, 2)


def test_tables_and_numbers(script, tmp_path, capsys):
    assert script.main(["--quick", "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "OC20: skipped; give its records with --oc20 PATH" in captured.err
    assert (tmp_path / "kernel_error.md").read_text() == captured.out
    verdicts = captured.out.splitlines()[-3:]
    assert all("PASS" in line or "FAIL" in line for line in verdicts)
    with (tmp_path / "kernel_error.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    paid = [row for row in rows if float(row["budget"])]
    assert len(paid) == 6 * 2 * 3 and len(rows) == len(paid) + 6 * 2
    for row in paid:
        assert 0.9 * float(row["budget"]) < float(row["cost"]) <= float(row["budget"]), row
    alone = {
        (row["form"], row["rule"]): float(row["error"])
        for row in rows
        if row["feature_map"] == "exact" and row["qk"] == "unit"
    }
    assert alone["exact mask", "constant"] < 1e-10
    near = alone["near field", "shells 2 to 0.05"]
    assert near < 0.1 * alone["additive", str(script.PAPER)]
    assert near < 0.1 * alone["multiplicative", "shells 2 to 0.05"]
    assert near == pytest.approx(alone["near exact", "shells 2 to 0.05"], rel=1e-3)
    # More features: errors of random features fall as 1 / sqrt(m), 1/2 of one budget to the next.
    floor = [float(r["error"]) for r in paid if r["form"] == "exact mask" and r["qk"] == "unit"]
    assert len(floor) == 4
    for few, many in (floor[:2], floor[2:]):
        assert many == pytest.approx(few / 2, rel=0.25)


def test_a_bound_between_ratios_passes_one_and_fails_the_other(script):
    from kernel_error_report import Row, verdicts  # beside the script

    def row(form, rule, error):
        return Row("S", "unit", "positive", form, rule, 1, 64, 1e4, 1e4, error, 0.0, 0.0, 0.0)

    rows = [
        row("additive", str(script.PAPER), 1.0),
        row("additive", "sobol 64 σ 0.1", 0.5),
        row("near field", "constant", 0.3),
        row("near field", "shells 2 to 0.05", 0.15),
        row("near exact", "constant", 0.1),
    ]
    line = "| S | 10,000 | 0.150 PASS | 0.300 FAIL | 0.100 PASS | 0.200 PASS |"
    assert verdicts(rows).splitlines()[-1] == line


def test_near_field_is_the_sparse_one_of_the_package(script, data):
    """The dense kernel equals factors and the pairs of a neighbor list, and so do the sums."""
    x = data.positions[1]
    basis = script.masks()
    mask = script.build(script.Form("near field", "shells", 2, 0.05), basis, data, 0)
    kernel = mask.kernel(x)
    atoms = x.shape[1]
    graph = Data(pos=x[0], cell=torch.zeros(1, 3, 3).double(), pbc=torch.zeros(1, 3).bool())
    found = neighbor_list(Batch.from_data_list([graph]), script.CUTOFF)
    own = torch.arange(atoms)
    i, j = torch.cat((own, found.center)), torch.cat((own, found.neighbor))
    left, right = mask.factors(x)
    vector = torch.cat((torch.zeros(atoms, 3).double(), found.vector))
    far = (left @ right.mT)[0, :, i, j]
    pairs = mask.near(Pairs(torch.zeros_like(i), i, j, vector.new_zeros(1, 1)), vector, far)
    dense = left @ right.mT + pairs.dense(1, atoms, atoms)
    torch.testing.assert_close(dense, kernel, rtol=0, atol=1e-10)
    inside = (x[0, :, None] - x[0]).norm(dim=-1) < mask.near.onset * script.CUTOFF
    exact = basis.mask(x[:, :, None] - x[:, None]).exp()
    torch.testing.assert_close(kernel[..., inside], exact[..., inside], rtol=0, atol=1e-10)


@pytest.mark.parametrize("placement", ["near field", "near exact"])
def test_outputs_are_those_of_the_linear_form(script, data, placement):
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
def test_costs_are_the_multiplications_of_the_linear_forms(script, data, placement):
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
            mixing.linear(phi(sides[0]), phi(sides[1]), query)
        else:
            linear_with_kernel(phi(query), phi(query), query, factors)
    counted = counter.get_total_flops() / 2 / atoms / script.MASKS
    assert mask.cost(m, 0.0) == pytest.approx(counted, rel=0.03)
    assert mask.features(mask.cost(m, 9.0), 9.0) == m


def test_fits_find_what_lies_in_their_span(script, data):
    torch.manual_seed(0)
    shells = script.ShellNodes(data.diameter, 0.1, 3, normalized=True).double()
    truth, found = (script.ShellWeights(2, shells).double() for _ in range(2))
    target = script.along(truth, data.distance)
    assert script.fit(found, target, data.distance, data.share) < 1e-4 * target.std()
    torch.testing.assert_close(
        script.along(found, data.distance), target, rtol=0, atol=1e-3 * target.abs().max().item()
    )


def test_exact_outputs_are_softmax_with_the_mask(script, data):
    x, basis = data.positions[0], script.masks()
    query, key, value, exact = script.tokens(x, basis, "unit", 3)
    assert query.norm(dim=-1).sub(1).abs().max() < 1e-12
    logits = query @ key.mT + basis.mask(x[:, :, None] - x[:, None])
    torch.testing.assert_close(logits.softmax(dim=-1) @ value, exact, rtol=0, atol=1e-10)
    contact = script.along(basis, torch.linspace(1.0, 3.0, 41).double())
    assert torch.allclose(contact.abs().amax(dim=-1), torch.tensor(1.5).double())
