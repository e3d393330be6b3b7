"""A training step of a full-size model on genuine OC20 records."""

import torch
from shared_files import shared
from test_configs import oc20
from torch_geometric.data import Batch

from molflt.data.structures import open_dataset
from molflt.graph import EnergyRegressor


def test_full_size_flt_12l_takes_a_step():
    records = open_dataset(shared("oc20", "oc20_is2re_val20.lmdb"))
    net = EnergyRegressor(**oc20("flt-12l")["model"])
    assert sum(p.numel() for p in net.parameters()) > 60e6
    batch = Batch.from_data_list([records[0], records[1]])
    out = net(batch)
    free = ~batch.fixed
    loss = (out["energy"] - batch.y_relaxed).abs().mean() + (
        out["displacement"] - (batch.pos_relaxed - batch.pos)
    )[free].abs().mean()
    loss.backward()
    assert torch.isfinite(loss)
    before = [p.detach().clone() for p in net.parameters()]
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
    torch.optim.Adam(net.parameters(), lr=3e-4, eps=1e-6).step()
    assert any((a != b).any() for a, b in zip(before, net.parameters(), strict=True))
    with torch.no_grad():
        assert torch.isfinite(net(batch)["energy"]).all()
