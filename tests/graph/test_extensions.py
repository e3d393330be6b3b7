"""A periodic scheme is one class and one line: what else has to know of it does so by itself."""

import pytest
import torch
from graph.test_regressor import structure
from graph_cases import DIM, HEADS, close, graph, mixed, run
from torch_geometric.data import Batch

from molflt.graph import EnergyRegressor, GraphAttention
from molflt.graph.dense import DenseAtoms
from molflt.graph.geometry import Geometry
from molflt.graph.periodic import PERIODIC, Images


class AllImages(Images):
    """Images of all atoms, whatever their tags."""

    def dense(self, geometry: Geometry) -> DenseAtoms:
        return super().dense(geometry._replace(tags=None))


def test_extensions_keep_the_contract(monkeypatch):
    """Their options are arguments of their class, and those of others are refused."""
    monkeypatch.setitem(PERIODIC, "all_images", AllImages)
    torch.manual_seed(0)
    options, graphs = {"periodic": "all_images", "image_cutoff": 4.0}, mixed()
    net = GraphAttention(DIM, HEADS, **options).double()
    assert net.encoding.periodic.image_cutoff == 4.0
    close([run(net, [each])[0] for each in graphs], run(net, graphs))
    with pytest.raises(ValueError, match="max_frequency=0.2 has no effect with periodic='all_im"):
        GraphAttention(DIM, HEADS, **options, max_frequency=0.2)
    with pytest.raises(ValueError, match="near_field finds images itself; got AllImages"):
        GraphAttention(DIM, HEADS, **options, position="multiplicative", near_field=3.0)
    energies = []
    for periodic in ("all_images", "images"):
        torch.manual_seed(0)
        net = EnergyRegressor(16, 2, layers=1, position="spectral", periodic=periodic).double()
        energies.append(net.eval()(Batch.from_data_list([structure(9, 3)]))["energy"])
    assert (energies[0] - energies[1]).abs().max() > 1e-6


def test_a_cell_without_the_option_periodic_is_refused():
    """An explicit "none" may leave the boundaries out; a cell that is not periodic says nothing."""
    given = graph("crystal", 7)
    torch.manual_seed(0)
    silent, told = (
        GraphAttention(DIM, HEADS, **options).double() for options in ({}, {"periodic": "none"})
    )
    for more in ({"cell": given.cell}, {"cell": given.cell, "pbc": given.pbc}, {"pbc": given.pbc}):
        with pytest.raises(ValueError, match="has periodic=None"):
            silent(given.x, given.pos, **more)
        assert told(given.x, given.pos, **more).isfinite().all()
    open_axes = torch.zeros(3, dtype=torch.bool)
    assert silent(given.x, given.pos, cell=given.cell, pbc=open_axes).isfinite().all()
