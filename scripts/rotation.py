"""How far predictions move when structures are turned: python scripts/rotation.py RUN [RUN ...]

Random Fourier nodes are not rotation invariant, so FLT's energies scatter under rotation; softmax
with the exact mask must not. Prints, per run, the standard deviation over random rotations in SO(3)
of every structure, its mean over structures, beside the MAE of the unturned structures.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from scipy.spatial.transform import Rotation
from torch_geometric.data import Batch

from molflt.data import open_dataset
from molflt.data.splits import split_path
from molflt.train import load_run


def energies(model: torch.nn.Module, structures: list, turn: torch.Tensor) -> torch.Tensor:
    """Energies, eV, of all structures turned by one rotation matrix, in float64."""
    batch = Batch.from_data_list(structures)
    batch.pos, batch.cell = batch.pos.double() @ turn.T, batch.cell.double() @ turn.T
    with torch.no_grad():
        return model(batch)["energy"]


def main() -> None:
    """Measures every run named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--split", default="val_id")
    parser.add_argument("--structures", type=int, default=100)
    parser.add_argument("--rotations", type=int, default=20)
    options = parser.parse_args()
    try:
        loaded = {run: load_run(run) for run in options.runs}
    except FileNotFoundError as error:
        parser.error(str(error))
    print("| run | MAE, eV | sd over SO(3), eV | sd about the surface normal, eV |")
    print("|---|---|---|---|")
    for run, (model, config) in loaded.items():
        model = model.double()
        data = open_dataset(split_path(Path(config["data"]["root"]), options.split))
        structures = [data[i] for i in range(min(options.structures, len(data)))]
        target = torch.cat([s.y_relaxed for s in structures])
        still = energies(model, structures, torch.eye(3, dtype=torch.float64))
        scatter = []
        for about in ("all", "z"):
            if about == "all":
                turns = Rotation.random(options.rotations, rng=0)
            else:
                angles = np.linspace(0, 360, options.rotations, endpoint=False)
                turns = Rotation.from_euler("z", angles[:, None], degrees=True)
            turned = torch.stack(
                [energies(model, structures, torch.from_numpy(t)) for t in turns.as_matrix()]
            )
            scatter.append(turned.std(dim=0).mean().item())
        mae = (still - target).abs().mean().item()
        print(f"| {run} | {mae:.4f} | {scatter[0]:.2e} | {scatter[1]:.2e} |")


if __name__ == "__main__":
    main()
