"""GraphAttention in PyG pipelines: the lines that put it into GPSConv, and the scripts."""

import csv
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.io import write
from script_files import load_script
from torch import nn
from torch_geometric.data import Batch
from torch_geometric.nn import GINEConv, GPSConv
from torch_geometric.utils import to_dense_batch

from molflt.graph import GraphAttention

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def gps() -> ModuleType:
    return load_script("gps")


@pytest.fixture(scope="module")
def long_range() -> ModuleType:
    return load_script("long_range")


@pytest.fixture(scope="module")
def structures(gps: ModuleType) -> list:
    data = gps.read(ROOT / "datasets" / "emt-sample", "val_id", 4)
    for one in data:
        one.pos, one.cell = one.pos.double(), one.cell.double()
        one.edge_weight = one.edge_weight.double()
    return data


def inputs(batch: Batch, seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(batch.pos), 16, dtype=torch.float64, generator=generator)
    edges = torch.randn(batch.num_edges, 5, dtype=torch.float64, generator=generator)
    return x, {"edge_attr": edges}


class DenseSoftmax(nn.Module):
    """What GPSConv does with nn.MultiheadAttention, called as GraphAttention is."""

    def __init__(self, inner: nn.MultiheadAttention) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x, pos, batch, cell, pbc):
        dense, mask = to_dense_batch(x, batch)
        out, _ = self.inner(dense, dense, dense, key_padding_mask=~mask, need_weights=False)
        return out[mask]


@pytest.mark.parametrize("training", [True, False])
def test_the_six_lines_are_gpsconv(gps: ModuleType, structures: list, training: bool) -> None:
    """With GPSConv's own attention in the new place, outputs and gradients are GPSConv's."""
    torch.manual_seed(0)
    batch = Batch.from_data_list(structures)
    x, edges = inputs(batch)
    own = GPSConv(16, GINEConv(nn.Linear(16, 16), edge_dim=5), heads=2).double()
    for parameter in own.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    ours = gps.SpatialGPSConv(16, GINEConv(nn.Linear(16, 16), edge_dim=5), heads=2).double()
    ours.load_state_dict(own.state_dict())
    ours.attn = DenseSoftmax(ours.attn)
    results = []
    for layer, places in ((own, ()), (ours, (batch.pos, batch.cell, batch.pbc))):
        layer.train(training)
        leaf = x.clone().requires_grad_()
        out = layer(leaf, batch.edge_index, batch.batch, *places, **edges)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaf)))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-10)


def test_graph_attention_works_there_and_an_assignment_alone_does_not(
    gps: ModuleType, structures: list
) -> None:
    """GPSConv passes over an attention it does not know; the six lines call it."""
    torch.manual_seed(0)
    batch = Batch.from_data_list(structures)
    x, edges = inputs(batch)

    def change(layer: GPSConv, *places: torch.Tensor) -> float:
        """Of outputs, when all weights of the attention are multiplied by 2."""
        layer.attn = GraphAttention(16, heads=2, num_features=8)
        layer = layer.double().eval()
        with torch.no_grad():
            before = layer(x, batch.edge_index, batch.batch, *places, **edges)
            for parameter in layer.attn.parameters():
                parameter *= 2
            after = layer(x, batch.edge_index, batch.batch, *places, **edges)
        return (after - before).abs().max().item()

    conv = GINEConv(nn.Linear(16, 16), edge_dim=5)
    assert change(GPSConv(16, conv, heads=2)) == 0
    assert change(gps.SpatialGPSConv(16, conv, heads=2), batch.pos, batch.cell, batch.pbc) > 0.1


def test_a_graph_has_the_same_energy_alone_and_in_a_batch(
    gps: ModuleType, structures: list
) -> None:
    for variant in gps.VARIANTS:
        if variant == "local + PyG's Performer":
            continue  # padding changes it
        torch.manual_seed(0)
        model = gps.Model(variant).double().eval()
        with torch.no_grad():
            together = model(Batch.from_data_list(structures))
            alone = torch.cat([model(Batch.from_data_list([one])) for one in structures])
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-10, msg=variant)


def test_gps_prints_a_row_per_variant_and_learns(
    gps: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gps.main(["--quick", "--data", str(ROOT / "datasets" / "emt-sample")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0][2:] for line in lines[3:]] == list(gps.VARIANTS)
    assert gps.main(["--quick", "--data", "nowhere"]) == 2
    data = gps.read(ROOT / "datasets" / "emt-sample", "train", 32)
    variant = "local + GraphAttention, multiplicative, reciprocal"
    errors = [gps.mae(gps.train(variant, data, steps, seed=0), data, data) for steps in (1, 30)]
    assert errors[1] < 0.6 * errors[0]


def dimers(folder: Path, seed: int = 0) -> None:
    """Two ions of charges +1 and -1, one atom and two, E = -14.4 eV Å / r of centers."""
    generator = np.random.default_rng(seed)
    far = {"train": np.linspace(6.0, 12.0, 8), "test": np.linspace(13.0, 15.0, 3)}
    for split, distances in far.items():
        frames = []
        for distance in distances:
            axis = generator.normal(size=3)
            center = distance * axis / np.linalg.norm(axis)
            half = np.array([0.6, 0.0, 0.0])
            positions = [np.zeros(3), center + half, center - half]
            frame = Atoms("NaO2", positions, cell=[40, 40, 40], pbc=True)
            frame.info = {
                "indexB": 1,
                "inter_energy": -14.4 / distance,
                "distance": distance,
                "label": "CC",
            }
            frames.append(frame)
        write(folder / f"{split}-id0.xyz", frames, format="extxyz")


def test_long_range_writes_what_it_promises(
    long_range: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dimers(tmp_path)
    out = tmp_path / "out"
    assert long_range.main(["--quick", "--data", str(tmp_path), "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0][2:] for line in lines[4:]] == list(long_range.VARIANTS)
    # mean of 14.4 / r at 13, 14, 15 Å, and of its difference to the last one trained on, meV
    assert lines[2].split(" | ")[2] == "1032.1" and lines[3].split(" | ")[2] == "167.9"
    assert (out / "curves.png").stat().st_size > 10_000
    with (out / "long_range.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 11 * len(long_range.VARIANTS)
    local = [row for row in rows if row["variant"] == "local"]
    assert all(abs(float(row["predicted_eV"])) < 1e-5 for row in local)  # nothing within 5 Å
    assert long_range.main(["--data", str(tmp_path / "nowhere")]) == 2


def test_sums_extrapolate_a_coulomb_law_that_message_passing_does_not_see(
    long_range: ModuleType, tmp_path: Path
) -> None:
    dimers(tmp_path)
    training, test = (long_range.read(tmp_path, split) for split in ("train", "test"))
    model = long_range.train("sum, free", training, steps=200, seed=0)
    with torch.no_grad():
        error = (long_range.binding(model, test.graphs) - test.energy).abs().mean()
    # Measured 0.06 to 0.07 with seeds 0 to 2; message passing has 1, the last in training 0.16.
    assert error < 0.12 * test.energy.abs().mean()
