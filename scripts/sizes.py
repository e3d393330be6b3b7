"""Measure how predicted adsorption energies depend on the size of the slab and the cell.

    python scripts/sizes.py runs/game-net --data datasets/game-net/fg
    python scripts/sizes.py peer:painn peer:schnet --data datasets/game-net/fg --minutes 12 \\
        --config configs/game-net.yaml --out runs/sizes-peers -- --task.lr 0.0015

RUN is the folder of a run or an exported model. peer:NAME is one of the networks of peers.py. It is
trained with --config, the options after --, seed 0 and --minutes of CPU time, and stored in
OUT/jobs. The initial structures are drawn from all splits whose names start with val, in proportion
to their sizes. The columns are mean absolute values in eV:

2x1, 2x2, 3x3   change if the slab is repeated in the plane and keeps one adsorbate
3x3 - 2x2       change from 2x2 to 3x3
whole           E / 2 - E(1x1), where E is the energy of the cell repeated 2x1 with its adsorbate
slab            energy of the clean slab
8 Å, 12 Å ...   energy with the adsorbate lifted by this distance, with the same vacuum above it
vacuum          change if the vacuum is doubled
two             E(AB) - E(A) - E(B) of two drawn adsorbates on the same slab, at least 10 Å apart

"refused" means that the model raises an error. Energies are in float64. Writes sizes.json.
"""

import argparse
import json
import warnings
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from ase import Atoms
from ase.geometry import get_distances
from kit.rows import markdown
from kit.words import described, guarded, parsed, refuse_idle
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
APART = 10.0  # Å, minimum distance between two adsorbates on one slab
MOST = 3_000  # maximum number of atoms in a batch


class System(NamedTuple):
    """A slab, an adsorbate that does not cross a cell boundary, and the vacuum height in Å."""

    slab: Atoms
    adsorbate: Atoms
    vacuum: float

    @property
    def whole(self) -> Atoms:
        return self.slab + self.adsorbate


def separate(atoms: Atoms) -> System:
    """Moves all atoms to periodic images below the vacuum and separates adsorbate and slab."""
    atoms = atoms.copy()
    scaled = atoms.get_scaled_positions(wrap=False)[:, 2]
    order = np.sort(scaled % 1)
    gaps = np.diff(order, append=order[0] + 1)
    start = order[(gaps.argmax() + 1) % len(order)] - 1e-6
    atoms.positions += np.round((scaled - start) % 1 + start - scaled)[:, None] * atoms.cell[2]
    mask = atoms.get_tags() == Tag.ADSORBATE
    adsorbate = atoms[mask]
    done, left = [0], list(range(1, len(adsorbate)))
    while left:  # move the nearest atom to its nearest image
        pos = adsorbate.positions
        vectors, lengths = get_distances(pos[done], pos[left], atoms.cell, atoms.pbc)
        i, j = np.unravel_index(lengths.argmin(), lengths.shape)
        adsorbate.positions[left[j]] = pos[done[i]] + vectors[i, j]
        done.append(left.pop(j))
    vacuum = gaps.max() / np.linalg.norm(atoms.cell.reciprocal()[2])
    return System(atoms[~mask], adsorbate, float(vacuum))


def higher(atoms: Atoms, height: float, lift: float = 0.0) -> Atoms:
    """Increases the height of the cell by `height` and lifts the adsorbate by `lift`, in Å."""
    atoms = atoms.copy()
    up = atoms.cell.reciprocal()[2]  # normal of the surface
    up /= np.linalg.norm(up)
    atoms.cell[2] += height * up
    atoms.positions[atoms.get_tags() == Tag.ADSORBATE] += lift * up
    return atoms


def pair(one: System, other: System) -> tuple[Atoms, Atoms, Atoms] | None:
    """Returns three structures: two adsorbates on one slab, and each of them alone on this slab.

    The adsorbates are as close as `APART` permits. The slab is the smallest of 2x2 to 5x5 that is
    large enough. Returns None if all slabs are too small.
    """
    for n in range(2, 6):
        large, places = one.slab.repeat((n, n, 1)), []
        for i, j in product(range(n), repeat=2):
            moved = other.adsorbate.copy()
            moved.positions += i * one.slab.cell[0] + j * one.slab.cell[1]
            both = one.adsorbate.positions, moved.positions
            apart = get_distances(*both, large.cell, large.pbc)[1].min()
            if apart >= APART:
                places.append((apart, i, j, moved))
        if places:
            *_, moved = min(places, key=lambda place: place[:3])
            return large + one.adsorbate + moved, large + one.adsorbate, large + moved
    return None


def pairs(systems: Sequence[System]) -> list[tuple[Atoms, Atoms, Atoms]]:
    """Returns `pair` for each system and the next system on the same slab; omits None."""

    def same(one: Atoms, other: Atoms) -> bool:
        ends = [np.concatenate((slab.positions, slab.cell.array)) for slab in (one, other)]
        return str(one.symbols) == str(other.symbols) and np.allclose(*ends, atol=0.01)

    found = []
    for i, one in enumerate(systems):
        other = next((other for other in systems[i + 1 :] if same(one.slab, other.slab)), None)
        if other is not None and (atoms := pair(one, other)) is not None:
            found.append(atoms)
    return found


def draw(root: Path, count: int) -> list[System]:
    """Draws systems with a fixed seed from all validation splits, in proportion to split sizes."""
    names = [name for name in pool.splits_of(root) if name.startswith("val")]
    sets = [open_dataset(split_path(root, name)) for name in names]
    total, rng, systems = sum(map(len, sets)), np.random.default_rng(0), []
    for dataset in sets:
        share = min(len(dataset), max(1, round(count * len(dataset) / total)))
        for index in np.sort(rng.choice(len(dataset), share, replace=False)):
            atoms = dataset.to_atoms(int(index))
            if not {Tag.SURFACE, Tag.ADSORBATE} <= {*atoms.get_tags()}:
                raise ValueError(f"{dataset.path}: sid {atoms.info['sid']}: expected tags 1 and 2")
            systems.append(separate(atoms))
    return systems


def build(systems: Sequence[System]) -> dict[str, list[Atoms]]:
    """Returns structures, keyed by name; AB, A and B are built by `pairs`."""
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
    """Returns a record with float64 positions and cell, which `make_record` rounds to float32."""
    pos, cell = atoms.positions, atoms.cell.array
    own = {"pos": pos, "cell": cell, "pbc": atoms.pbc, "tags": atoms.get_tags()}
    record = make_record(**own, atomic_numbers=atoms.numbers, fixed=fixed_atoms(atoms))
    record.pos, record.cell = torch.from_numpy(pos), torch.from_numpy(cell)[None]
    return record


def energies(model: nn.Module, structures: Sequence[Atoms]) -> NDArray[np.float64]:
    """Returns energies in eV, which are all NaN if the model raises an error for a structure."""
    size, parts = max(1, MOST // max(map(len, structures))), []
    for start in range(0, len(structures), size):
        batch = Batch.from_data_list(list(map(record_of, structures[start : start + size])))
        try:
            parts.append(model(batch)["energy"])
        except ValueError:
            return np.full(len(structures), np.nan)
    return torch.cat(parts).numpy()


def changes(energy: Mapping[str, NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
    """Computes the columns of the table: energies of structures and their differences, in eV."""
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
    """Returns models, keyed by name; trains the peers that have not been trained yet."""
    peers = [run.removeprefix(PEER) for run in options.runs if run.startswith(PEER)]
    if unknown := sorted({*peers} - {*NETS}):
        raise ValueError(f"{PEER}{unknown[0]}: expected one of {', '.join(NETS)}")
    own = {"models": peers, "seeds": 1, "fractions": [1.0], "evaluations": 1}
    jobs = pool.comparison(argparse.Namespace(**{**vars(options), **own}), {})
    if jobs and not pool.run(jobs, 1):
        raise ValueError(f"{options.out / 'logs'}: a training run failed; see its log")
    found = {PEER + job["model"]: net_of(job, path) for path, job in jobs.items()}
    return {run: found[run] if run in found else molflt.load(run).model for run in options.runs}


@guarded
def main(words: list[str] | None = None) -> None:
    parser = described(__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--data", type=Path, required=True, help="folder of compact stores")
    parser.add_argument("--systems", type=int, default=100, help="approximate number of systems")
    parser.add_argument("--out", type=Path, default=Path("runs/sizes"))
    parser.add_argument("--config", type=Path, default=Path("configs/game-net.yaml"))
    parser.add_argument("--minutes", type=float, default=10.0, help="CPU time for training a peer")
    options = parsed(parser, words)
    if not any(run.startswith(PEER) for run in options.runs):
        refuse_idle(parser, options, f"without {PEER}NAME", "config", "minutes", "words")
    torch.set_flush_denormal(True)  # otherwise, SchNet is five times slower
    structures, nets = build(draw(options.data, options.systems)), models(options)
    rows: dict[str, dict[str, float | None]] = {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about sizes and elements
        for run, net in nets.items():
            net.double().eval()
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
    raise SystemExit(main())
