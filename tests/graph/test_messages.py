import math

import pytest
import torch
from contract import EXACT
from graph.test_regressor import structure
from torch_geometric.data import Batch

from molflt.graph import EnergyRegressor, neighbors
from molflt.graph import messages as messages_module
from molflt.graph.geometry import Geometry
from molflt.graph.heads import ElementEmbedding, element_descriptors, period_and_group
from molflt.graph.messages import EquivariantMessages
from molflt.graph.neighbors import Neighbors, neighbor_list
from molflt.graph.radial import radial_waves

CUTOFF = 4.0


def messages(layers: int = 2) -> EquivariantMessages:
    return EquivariantMessages(8, layers, CUTOFF).double()


def around(pos: torch.Tensor) -> Neighbors:
    """Returns all pairs of different atoms of a molecule, even beyond the cutoff."""
    center, neighbor = (~torch.eye(len(pos), dtype=torch.bool)).nonzero().T
    vector = pos[neighbor] - pos[center]
    return Neighbors(center, neighbor, vector, vector.norm(dim=-1))


def points(atoms: int = 6) -> torch.Tensor:
    return structure(atoms, seed=5).pos


def by_hand(net: EquivariantMessages, tokens: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """Computes PaiNN's equations 7 to 10, atom by atom and pair by pair."""
    s, v = list(tokens), [torch.zeros(3, 8, dtype=pos.dtype) for _ in pos]
    for layer in net.layers:
        phi = [layer.message(layer.norm(x)) * 0.25 for x in s]
        new_s, new_v = list(s), list(v)
        for i in range(len(pos)):
            for j in range(len(pos)):
                if i == j:
                    continue
                r = pos[j] - pos[i]
                wave = radial_waves(r.norm()[None], 8, CUTOFF)[0]
                f, h, *g = (phi[j] * (layer.filter.weight @ wave)).split(8)
                new_s[i] = new_s[i] + f
                new_v[i] = new_v[i] + torch.outer(r / r.norm(), h) + (v[j] * g[0] if g else 0.0)
        for i in range(len(pos)):
            u, w = (layer.project.weight @ new_v[i].T).T.split(8, dim=1)
            length = torch.tensor([math.sqrt(1 + float(x @ x)) - 1 for x in w.T])
            own, product, turn = layer.update(
                torch.cat((layer.norm(new_s[i]), length.to(pos.dtype)))
            ).split(8)
            new_s[i] = new_s[i] + own + product * (u * w).sum(dim=0)
            new_v[i] = new_v[i] + turn * u
        s, v = new_s, new_v
    return torch.stack(s)


@pytest.mark.parametrize("layers", [1, 3])
@torch.no_grad()
def test_sums_are_those_of_the_equations(layers):
    net, pos = messages(layers), points()
    tokens = torch.randn(len(pos), 8, dtype=pos.dtype)
    found = net(tokens, around(pos), Geometry.of(torch.zeros(len(pos), 3)))
    torch.testing.assert_close(found, by_hand(net, tokens, pos), **EXACT)


def test_waves_equal_dimenet_before_the_envelope():
    """DimeNet's Bessel functions are multiplied by c / r."""
    r = torch.linspace(0.001, CUTOFF * 0.89, 4001, dtype=torch.float64)
    u = r / CUTOFF
    plain = radial_waves(r, 5, CUTOFF) * (u * u / (1 - u * u)).exp()[:, None] * u[:, None]
    expected = torch.stack([(n * math.pi * u).sin() for n in range(1, 6)], dim=1)
    torch.testing.assert_close(plain, expected, rtol=0, atol=1e-12)


def test_matrices_sum_as_pairs_do_and_as_pieces_of_them(monkeypatch):
    net, start = messages(3), points(7)
    graph = torch.tensor([0, 0, 2, 2, 2, 2, 2])
    geometry = Geometry.of(start, graph)

    def both() -> list[torch.Tensor]:
        pos = start.clone().requires_grad_()
        tokens = torch.linspace(-1, 1, 7 * 8, dtype=pos.dtype).reshape(7, 8)
        pairs = around(pos)
        inside = graph[pairs.center] == graph[pairs.neighbor]
        out = net(tokens, Neighbors(*(x[inside] for x in pairs)), geometry)
        (force,) = torch.autograd.grad(out.sum(), pos, create_graph=True)
        net.zero_grad()
        force.square().sum().backward()
        grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        return [out.detach(), force.detach(), *grads]

    of_matrices = both()
    monkeypatch.setattr(messages_module, "_SPARSEST", 0)
    of_pairs = both()
    monkeypatch.setattr(neighbors, "_MANY", 4)
    monkeypatch.setattr(neighbors, "_PIECE", 5)
    for found in (of_pairs, both()):
        torch.testing.assert_close(found, of_matrices, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_messages_of_adsorbates_leave_out_pairs_of_slab_atoms():
    """The radial summary still includes all pairs."""
    options = {"radial_basis": 4, "neighbor_cutoff": CUTOFF, "messages": 2}
    net = EnergyRegressor(8, 2, **options, message_pairs="adsorbate").double().embedding
    atoms = structure(9, seed=5)
    geometry = Geometry.of_data(Batch.from_data_list([atoms]))
    pairs = neighbor_list(geometry, CUTOFF)
    found = net(atoms.atomic_numbers, geometry, pairs)
    layers, net.messages = net.messages, None
    tokens = net(atoms.atomic_numbers, geometry, pairs)
    across = (atoms.tags[pairs.center] == 2) | (atoms.tags[pairs.neighbor] == 2)
    assert 0 < across.sum() < len(across)
    expected = layers(tokens, Neighbors(*(part[across] for part in pairs)), geometry)
    torch.testing.assert_close(found, expected, **EXACT)
    assert (found - layers(tokens, pairs, geometry)).abs().max() > 1e-3


def test_descriptors_are_standardized_and_of_all_elements_that_bind():
    table = element_descriptors()
    assert table.shape == (119, 8)
    unknown = table.isnan().any(dim=1).nonzero()[:, 0].tolist()
    assert unknown == [0, 2, 10, 18, *range(104, 119)]
    known = table[~table[:, 0].isnan()]
    torch.testing.assert_close(known.mean(dim=0), torch.zeros(8), rtol=0, atol=1e-5)
    torch.testing.assert_close(known.std(dim=0, correction=0), torch.ones(8), rtol=0, atol=1e-5)


def test_places_in_the_periodic_table():
    numbers = (1, 2, 6, 57, 72, 118)
    places = [(1, 1), (1, 18), (2, 14), (6, 3), (6, 4), (7, 18)]
    assert [period_and_group(number) for number in numbers] == places


def test_training_leaves_out_vectors_of_elements() -> None:
    """Only training steps describe half of the elements by descriptors alone."""
    embedding = ElementEmbedding(4, descriptors=True)
    some = torch.tensor([1, 6, 8, 29, 78])
    by_descriptors = embedding.eval()(some).detach()
    with torch.no_grad():
        embedding.weight.fill_(1.0)
    torch.testing.assert_close(embedding(some), by_descriptors + 1)
    embedding.train()
    steps = torch.stack([embedding(some) - by_descriptors for _ in range(400)])
    assert set(steps.detach().round(decimals=4).unique().tolist()) == {0.0, 1.0}
    assert (steps.mean(dim=(0, 2)) - 0.5).abs().max() < 0.1
    plain = ElementEmbedding(4).train()
    torch.testing.assert_close(plain(some), plain.weight[some])
