"""Training of full-size and small models on the 20 genuine OC20 records."""

from pathlib import Path

import pytest
import torch
import yaml
from torch_geometric.data import Batch

from molflt.data.structures import open_dataset
from molflt.graph import EnergyRegressor

ROOT = Path(__file__).resolve().parents[1]
LMDB = ROOT.parent / "shared" / "data" / "oc20" / "oc20_is2re_val20.lmdb"
pytestmark = pytest.mark.skipif(not LMDB.exists(), reason=f"no OC20 records at {LMDB}")


@pytest.fixture(scope="module")
def records():
    dataset = open_dataset(LMDB)
    return [dataset[i] for i in range(len(dataset))]


def test_full_size_flt_12l_takes_a_step(records):
    files = [ROOT / "configs" / "oc20" / f"{name}.yaml" for name in ("base", "flt")]
    base, flt = (yaml.safe_load(file.read_text())["model"] for file in files)
    net = EnergyRegressor(**base, **flt)
    assert sum(p.numel() for p in net.parameters()) > 60e6
    batch = Batch.from_data_list(records[:2])
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
