"""Measures how adsorption energies behave at sizes other than those of training.

    python scripts/sizes.py runs/game-net --data datasets/game-net/fg
    python scripts/sizes.py runs/game-net peer:painn peer:schnet --data datasets/game-net/fg \\
        --config configs/game-net.yaml --out runs/sizes -- --task.lr 0.0015

RUN is the folder of a run or an exported model. peer:NAME is a net of scripts/peers.py, trained as
there with the options of --config and those after --, for --minutes of CPU time and seed 0. Weights
and results are kept in OUT/jobs; the script trains nothing twice.

Structures are the initial ones of all splits that start with val, in proportion to their sizes.
Columns are mean absolute values in eV:

2x1, 2x2, 3x3   change if the slab is repeated in the plane under one adsorbate
3x3 - 2x2       difference of the two
whole           E / 2 - E(1x1) of the cell repeated 2x1 with its adsorbate
slab            energy of the clean slab
8 Å, 12 Å ...   energy with the adsorbate lifted by so much, under the same vacuum
vacuum          change if the vacuum is doubled
two             E(AB) - E(A) - E(B) of two adsorbates on one slab, at least 10 Å apart

"refused" means that the model raises an error. Energies are computed in float64. Writes
sizes.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from ase import Atoms
from kit.rows import markdown
from kit.slabs import System, higher, pairs, separate
from kit.words import described, guarded, parsed
from numpy.typing import NDArray
from peers_kit import pool
from peers_kit.jobs import net_of
from peers_kit.models import NETS
from torch import nn
from torch_geometric.data import Batch, Data

import molflt
from molflt.atoms import Tag
from molflt.data.structures import open_dataset
from molflt.data.structures.ase_fields import fixed_atoms
from molflt.data.structures.records import make_record
from molflt.data.structures.sources import split_path
from molflt.files import write_atomically

PEER = "peer:"
REPEATS = {"2x1": (2, 1, 1), "2x2": (2, 2, 1), "3x3": (3, 3, 1)}
LIFTS = (8, 12, 20)  # Å
MOST = 3_000  # atoms in a batch


def draw(root: Path, count: int) -> list[System]:
    """Systems of all validation splits in proportion to their sizes, always the same ones."""
    names = [name for name in pool.splits_of(root) if name.startswith("val")]
    sets = [open_dataset(split_path(root, name)) for name in names]
    total, rng, systems = sum(map(len, sets)), np.random.default_rng(0), []
    for dataset in sets:
        share = min(len(dataset), max(1, round(count * len(dataset) / total)))
        for index in np.sort(rng.choice(len(dataset), share, replace=False)):
            atoms = dataset.to_atoms(int(index))
            if not {Tag.SURFACE, Tag.ADSORBATE} <= {*atoms.get_tags()}:
                raise ValueError(
                    f"{dataset.path}: sid {atoms.info['sid']}: expected tags 1, surface, and 2, "
                    f"adsorbate; got {sorted({*atoms.get_tags().tolist()})}; choose other --data"
                )
            systems.append(separate(atoms))
    return systems


def build(systems: Sequence[System]) -> dict[str, list[Atoms]]:
    """Structures by name, those of pairs in the order of `pairs`."""
    found = {"1x1": [one.whole for one in systems]}
    for name, counts in REPEATS.items():
        found[name] = [one.slab.repeat(counts) + one.adsorbate for one in systems]
    found["whole"] = [one.whole.repeat((2, 1, 1)) for one in systems]
    found["slab"] = [one.slab for one in systems]
    for lift in LIFTS:
        found[f"{lift} Å"] = [higher(one.whole, lift, lift) for one in systems]
    found["vacuum"] = [higher(one.whole, one.vacuum) for one in systems]
    for name, part in zip(("AB", "A", "B"), zip(*pairs(systems), strict=True), strict=False):
        found[name] = list(part)
    return found


def record_of(atoms: Atoms) -> Data:
    """A record in float64, to which `make_record` does not round it."""
    pos, cell = atoms.positions, atoms.cell.array
    own = {"pos": pos, "cell": cell, "pbc": atoms.pbc, "tags": atoms.get_tags()}
    record = make_record(**own, atomic_numbers=atoms.numbers, fixed=fixed_atoms(atoms))
    record.pos, record.cell = torch.from_numpy(pos), torch.from_numpy(cell)[None]
    return record


def energies(model: nn.Module, structures: Sequence[Atoms]) -> NDArray[np.float64]:
    """Energies, eV; NaN if the model refuses a structure."""
    size, parts = max(1, MOST // max(map(len, structures))), []
    for start in range(0, len(structures), size):
        batch = Batch.from_data_list(list(map(record_of, structures[start : start + size])))
        try:
            parts.append(model(batch)["energy"])
        except ValueError:
            return np.full(len(structures), np.nan)
    return torch.cat(parts).numpy()


def changes(energy: Mapping[str, NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
    """Deviations by column, eV, of energies of `build`."""
    one = energy["1x1"]
    found = {name: energy[name] - one for name in REPEATS}
    found["3x3 - 2x2"] = energy["3x3"] - energy["2x2"]
    found["whole"] = energy["whole"] / 2 - one
    found |= {name: energy[name] for name in ("slab", *(f"{lift} Å" for lift in LIFTS))}
    found["vacuum"] = energy["vacuum"] - one
    if "AB" in energy:
        found["two"] = energy["AB"] - energy["A"] - energy["B"]
    return found


def models(options: argparse.Namespace) -> dict[str, nn.Module]:
    """Models by name; trains peers that have no result yet."""
    peers = [run.removeprefix(PEER) for run in options.runs if run.startswith(PEER)]
    if unknown := sorted({*peers} - {*NETS}):
        raise ValueError(f"{PEER}{unknown[0]}: expected one of {', '.join(NETS)}")
    ours = {run: molflt.load(run).model for run in options.runs if not run.startswith(PEER)}
    own = {"models": peers, "seeds": 1, "fractions": [1.0], "evaluations": 1}
    jobs = pool.comparison(argparse.Namespace(**{**vars(options), **own}), {})
    if jobs and not pool.run(jobs, 1):
        raise ValueError(f"{options.out / 'logs'}: a training failed; read its log")
    nets = {PEER + job["model"]: net_of(job, path) for path, job in jobs.items()}
    every = ours | nets
    return {run: every[run].double().eval() for run in options.runs}


@guarded
def main(words: list[str] | None = None) -> None:
    """Prints the table."""
    parser = described(__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--data", type=Path, required=True, help="folder of compact stores")
    parser.add_argument("--systems", type=int, default=100, help="about how many are drawn")
    parser.add_argument("--out", type=Path, default=Path("runs/sizes"))
    parser.add_argument("--config", type=Path, default=Path("configs/game-net.yaml"))
    parser.add_argument("--minutes", type=float, default=10.0, help="CPU time to train a peer")
    options = parsed(parser, words)
    torch.set_flush_denormal(True)  # SchNet is five times as slow without
    structures = build(draw(options.data, options.systems))
    nets, rows = models(options), {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes and elements that training does not have
        for run, net in nets.items():
            found = changes({name: energies(net, part) for name, part in structures.items()})
            means = {name: float(np.abs(values).mean()) for name, values in found.items()}
            rows[run] = {name: None if np.isnan(mean) else mean for name, mean in means.items()}
    numbers = {name: len(part) for name, part in structures.items()}
    result = {"data": str(options.data), "structures": numbers, "eV": rows}
    text = json.dumps(result, indent=1, ensure_ascii=False)
    write_atomically(options.out / "sizes.json", f"{text}\n".encode())
    cells = [[run, *(_cell(value) for value in row.values())] for run, row in rows.items()]
    print(markdown(["mean change, eV", *next(iter(rows.values()))], cells))


def _cell(mean: float | None) -> str:
    if mean is None:
        return "refused"
    return f"{mean:.4f}" if mean >= 1e-4 else f"{mean:.0e}"


if __name__ == "__main__":
    sys.exit(main())
