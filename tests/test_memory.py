"""A lack of memory is reported in one line, if possible before memory is allocated."""

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from ase.build import bulk
from tiny_run import structures
from torch import nn
from torch_geometric.data import Batch

import molflt.memory
from molflt import memory
from molflt.data.structures import open_dataset
from molflt.data.structures.ase_fields import Converter
from molflt.data.structures.store import write_store
from molflt.evaluation.predictions import infer
from molflt.graph import EnergyRegressor, neighbors
from molflt.graph.geometry import Geometry

FAILURES = {
    "torch": lambda _: torch.empty(2**58),
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "c++": RuntimeError("std::bad_alloc"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_predictions_name_batch_and_largest_structure(tmp_path: Path, failure: str) -> None:
    write_store(tmp_path / "few.safetensors", structures(3, first_sid=70))
    dataset = open_dataset(tmp_path / "few.safetensors")
    sizes = [int(record.natoms) for record in dataset]
    greedy = nn.Linear(1, 1)
    greedy.forward = Mock(side_effect=FAILURES[failure])
    largest = f"sid {70 + int(np.argmax(sizes))} .*{max(sizes)} atoms"
    with pytest.raises(ValueError, match=rf"few\.safetensors: .*{largest}.*--batch-size"):
        infer(greedy, dataset, 8, "few")


def crystal(side: int) -> Batch:
    atoms = bulk("Cu", "sc", 2.6).repeat(side)
    atoms.set_tags(1)
    return Batch.from_data_list([Converter().record(atoms)] * 2)


def small(**options: object) -> EnergyRegressor:
    return EnergyRegressor(dim=16, heads=2, layers=1, ffn_dim=16, num_features=8, **options).eval()


def test_reciprocal_nodes_are_limited_before_allocation(monkeypatch) -> None:
    model, batch = small(), crystal(4)
    geometry = Geometry.of_data(batch)
    nodes = model.encoding.periodic.nodes(geometry, model.encoding.position)
    waves = 2 * 4 * 2 * nodes.xi.shape[1] * 2 * 2 * 64  # both sides, bytes, waves, graphs, heads
    monkeypatch.setattr(memory, "_SMALL", 0)
    monkeypatch.setattr(neighbors, "expect_memory", lambda *_: None)  # neighbors come first
    monkeypatch.setattr(memory, "available_memory", lambda: int(1.5 * waves) - 1)
    with pytest.raises(MemoryError, match=f"{nodes.xi.shape[1]} reciprocal nodes"):
        model(batch)
    monkeypatch.setattr(memory, "available_memory", lambda: int(1.5 * waves))
    model(batch)
    # smaller structures are not padded to the largest
    model(Batch.from_data_list([batch[0], *crystal(1).to_data_list()]))
    monkeypatch.setattr(memory, "available_memory", lambda: 1)
    monkeypatch.setattr(memory, "_SMALL", 2**26)
    model(batch)  # too small to check


GIB = 2**30


@pytest.mark.parametrize("limited", ["job", None])
def test_limits_of_control_groups(monkeypatch, tmp_path, limited) -> None:
    """SLURM, systemd-run and containers limit the group of the process or a parent group."""
    for group in ("", "job", "job/step", "other"):
        folder = tmp_path / group
        folder.mkdir(parents=True, exist_ok=True)
        small = group == limited or group == "other"
        (folder / "memory.max").write_text(str(GIB if small else "max"))
        (folder / "memory.current").write_text(str(GIB // 2))
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {GIB // 4}\n")
    own = tmp_path / "own"
    own.write_text("1:cpu:/other\n0::/job/step\n")
    monkeypatch.setattr(molflt.memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(molflt.memory, "_CGROUP", own)
    monkeypatch.setattr("psutil.virtual_memory", lambda: Mock(available=100 * GIB))
    assert molflt.memory.available_memory() == (100 * GIB if limited is None else 3 * GIB // 4)
