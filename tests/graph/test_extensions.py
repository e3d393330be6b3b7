"""A periodic scheme is one class and one line: what else has to know of it does so by itself."""

import pytest
import torch
from graph.test_regressor import structure
from graph_cases import DIM, HEADS, close, graph, mixed, run
from torch import Tensor
from torch_geometric.data import Batch

from molflt.graph import EnergyRegressor, GraphAttention
from molflt.graph.dense import DenseAtoms
from molflt.graph.geometry import Geometry
from molflt.graph.periodic import PERIODIC, Images


class AllImages(Images):
    """Images of all atoms, whatever their tags."""

    def dense(self, geometry: Geometry) -> DenseAtoms:
        return super().dense(geometry._replace(tags=None))


@pytest.fixture(autouse=True)
def added(monkeypatch):
    monkeypatch.setitem(PERIODIC, "all_images", AllImages)


def layer(**options) -> GraphAttention:
    torch.manual_seed(0)
    return GraphAttention(DIM, HEADS, periodic="all_images", **options).double()


def test_extensions_keep_the_contract():
    net, graphs = layer(image_cutoff=4.0), mixed()
    together = run(net, graphs)
    close([run(net, [each])[0] for each in graphs], together)
    given = graph("crystal", 7)
    moved = given._replace(pos=given.pos + torch.tensor([1.0, -0.3, 2.2]))
    close(run(net, [moved]), run(net, [given]))


def test_its_options_are_its_arguments_and_those_of_others_are_refused():
    assert layer(image_cutoff=4.0).encoding.periodic.image_cutoff == 4.0
    with pytest.raises(ValueError, match="max_frequency=0.2 has no effect with periodic='all_im"):
        layer(max_frequency=0.2)
    with pytest.raises(ValueError, match="near_field finds images itself; got AllImages"):
        layer(position="multiplicative", near_field=3.0)


def test_regressors_accept_the_extension():
    def energies(periodic: str) -> Tensor:
        torch.manual_seed(0)
        options = {"dim": 16, "heads": 2, "layers": 1, "position": "spectral"}
        net = EnergyRegressor(periodic=periodic, **options).double().eval()
        return net(Batch.from_data_list([structure(9, 3)]))["energy"]

    assert (energies("all_images") - energies("images")).abs().max() > 1e-6


def test_a_cell_without_the_option_periodic_is_refused():
    """An explicit "none" may leave the boundaries out; a cell that is not periodic says nothing."""
    given = graph("crystal", 7)
    torch.manual_seed(0)
    silent, told = (
        GraphAttention(DIM, HEADS, **options).double() for options in ({}, {"periodic": "none"})
    )
    for more in ({"cell": given.cell}, {"cell": given.cell, "pbc": given.pbc}, {"pbc": given.pbc}):
        with pytest.raises(ValueError, match="was not told what to do with it"):
            silent(given.x, given.pos, **more)
        assert told(given.x, given.pos, **more).isfinite().all()
    open_axes = torch.zeros(3, dtype=torch.bool)
    assert silent(given.x, given.pos, cell=given.cell, pbc=open_axes).isfinite().all()
