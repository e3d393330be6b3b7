"""Change of predictions of trained models when structures are turned.

Standard deviations over random rotations in space, and over turns about the surface normal, of
every structure's energy; their means over structures, beside the MAE of the unturned ones.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from kit.rows import Promise, Row, Rows, formatted
from scipy.spatial.transform import Rotation
from torch import Tensor
from torch_geometric.data import Batch, Data

from molflt.data.structures import open_dataset
from molflt.data.structures.sources import split_path
from molflt.training.checkpoint import load_run

QUICK = {"structures": 2, "rotations": 3}
PROMISES: list[Promise] = []  # what runs are given is not known


@torch.no_grad()
def energies(model: torch.nn.Module, structures: list[Data], turn: np.ndarray) -> Tensor:
    """Energies, eV, of all structures turned by one rotation matrix, in float64."""
    batch, matrix = Batch.from_data_list(structures), torch.from_numpy(turn)
    batch.pos, batch.cell = batch.pos.double() @ matrix.T, batch.cell.double() @ matrix.T
    return model(batch)["energy"]


def scatter(run: Path, split: str, structures: int, rotations: int) -> Row:
    """Results of one run."""
    model, config = load_run(run)
    data = open_dataset(split_path(Path(config["data"]["root"]), split))
    chosen = [data[i] for i in range(min(structures, len(data)))]
    target = torch.cat([one.y_relaxed for one in chosen])
    error = energies(model.double(), chosen, np.eye(3)) - target
    angles = np.linspace(0, 360, rotations, endpoint=False)
    turns = {
        "sd_space_eV": Rotation.random(rotations, rng=0),
        "sd_normal_eV": Rotation.from_euler("z", angles[:, None], degrees=True),
    }
    found = {
        name: torch.stack([energies(model, chosen, one) for one in own.as_matrix()])
        for name, own in turns.items()
    }
    spread = {name: values.std(dim=0).mean().item() for name, values in found.items()}
    return {"run": str(run), "mae_eV": error.abs().mean().item(), **spread}


def measure(
    runs: tuple[Path, ...],
    split: str = "val_id",
    structures: int = 100,
    rotations: int = 20,
) -> Rows:
    """Scatter of every run."""
    return [scatter(run, split, structures, rotations) for run in runs]


def table(rows: Rows) -> str:
    """A line per run."""
    spreads = {"in space": "{sd_space_eV:.2e}", "about the normal": "{sd_normal_eV:.2e}"}
    columns = {f"sd {name}, eV": form for name, form in spreads.items()}
    return formatted(rows, {"run": "{run}", "MAE, eV": "{mae_eV:.4f}", **columns})
