"""Compare latent charges of a potential with quantum chemistry: charged chains, neutral dimers.

    python scripts/charges.py chains carbon_chain.extxyz.xz --out runs/charges --seconds 240
    python scripts/charges.py dimers sapt_dimers.npz --out runs/charges --seconds 600

chains: C10H2 and C10H3+ (Ko et al., Nat. Commun. 12, 398, 2021) with Hirshfeld charges. Two
potentials, with and without total charges and 1/r, are trained on energies and forces of both
molecules. dimers: interaction energies of neutral dimers and their SAPT components
(doi:10.1063/5.0204064). A potential is trained on E(AB) - E(A) - E(B). All dimers of the same two
formulas are one system, which is in the training set or in the test set.

--seconds is the CPU time of each model. The same command continues an interrupted training.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
import torch
from ase.symbols import Symbols
from kit.budget import CpuBudget, averaged, fit
from kit.rows import markdown
from kit.words import described, guarded
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from molflt.graph import Potential
from molflt.graph.geometry import Geometry
from molflt.graph.long_range import COULOMB, inverse_power_sums

KCAL = 0.043364115  # eV, of 1 kcal/mol
UNIT = 0.1  # eV, of interaction energies
APART = 1e-3  # eV of exchange; molecules of dimers with less do not overlap
SIZES = {"dim": 64, "heads": 4, "ffn_dim": 128, "num_features": 16, "layers": 1, "refinements": 1}


def trained(
    name: str, model: Potential, loss_of: Callable[[int], Tensor], options: argparse.Namespace
) -> nn.Module:
    """The average of the weights of a trained model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3)
    average, budget = averaged(model, 0.99), CpuBudget(options.seconds)
    fit(options.out / f"{name}.ckpt", model, optimizer, budget, loss_of, 1.0, average)
    return average.module.eval()


def new(start: float, **options: Any) -> Potential:
    """A potential without a far field; `start` multiplies the initial latent charges."""
    torch.manual_seed(0)
    model = Potential(radial_basis=0, far_field=False, **SIZES, **options)
    if model.long_range is not None:
        model.long_range.charge.weight.data.mul_(start)
    return model


def drawn(seed: int, count: int, of: int) -> list[int]:
    """Different numbers below `of`."""
    return torch.randperm(of, generator=torch.Generator().manual_seed(seed))[:count].tolist()


def graph(numbers: Any, pos: Any, **labels: Tensor) -> Data:
    """A molecule."""
    return Data(
        atomic_numbers=torch.as_tensor(numbers).long(), pos=torch.as_tensor(pos).float(), **labels
    )


def chains(file: Path) -> list[Data]:
    """Frames with energy, forces, total charge and Hirshfeld charges."""
    return [
        graph(
            atoms.numbers,
            atoms.positions,
            energy=torch.tensor([atoms.get_potential_energy()], dtype=torch.float64),
            forces=torch.tensor(atoms.get_forces()).float(),
            charge=torch.tensor([atoms.info["total_charge"]]).float(),
            hirshfeld=torch.tensor(atoms.arrays["dft_charge"]),
        )
        for atoms in ase.io.read(file, ":")
    ]


def batch_of(frames: Sequence[Data], charged: bool) -> Batch:
    """A batch with total charges, or without."""
    batch = Batch.from_data_list(list(frames))
    if not charged:
        del batch.charge
    return batch


def run_chains(options: argparse.Namespace) -> str:
    """Errors of both potentials, and charges at the end of the chain."""
    frames = chains(options.file)
    order, cut = drawn(0, len(frames), len(frames)), 25 * len(frames) // 32
    train, test = ([frames[i] for i in part] for part in (order[:cut], order[cut:]))
    counts = torch.stack([one.atomic_numbers.bincount(minlength=119) for one in train]).double()
    energies, forces = (torch.cat([one[name] for one in train]) for name in ("energy", "forces"))
    ions = torch.cat([one.charge for one in test]).round()
    lines = []
    for name, extra in {"without": {}, "with": {"long_range": [1], "total_charge": True}}.items():
        near = {"near_field": options.cutoff, "neighbor_cutoff": options.cutoff}
        model = new(options.start, messages=1, **near, **extra)
        model.element_energies.copy_(torch.linalg.lstsq(counts, energies, driver="gelsd")[0])
        model.energy_std.fill_(float(forces.square().mean().sqrt()))

        def loss_of(step: int, model: Potential = model, charged: bool = bool(extra)) -> Tensor:
            batch = batch_of([train[i] for i in drawn(step, 10, len(train))], charged)
            energy, force = errors(model(batch), batch)
            return (10 * energy.abs().mean() + force.abs().mean()) / model.energy_std

        net = trained(
            f"chains-{options.cutoff:g}-{options.start:g}-{name}", model, loss_of, options
        )
        batch, row = batch_of(test, bool(extra)), [name]
        out = net(batch)
        energy, force = errors(out, batch)
        for own in (ions == 0, ions == 1, ions.isfinite()):
            row.append(f"{1e3 * energy[own].abs().mean():.2f}")
            row.append(f"{1e3 * force[own[batch.batch]].abs().mean():.0f}")
        lines.append(row)
    head = [f"{what}, {of}" for of in ("C10H2", "C10H3+", "all") for what in ("meV/atom", "meV/Å")]
    parts = [
        f"{len(train)} frames for training, {len(test)} for the test",
        markdown(["model", *head], lines),
        markdown(["end of the chain", "charges", "Hirshfeld"], far_end(out["charges"], batch)),
    ]
    return "\n\n".join(parts)


def errors(out: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
    """Errors of energies per atom (graphs,), eV, and of forces (atoms, 3), eV/Å."""
    return (out["energy"] - batch.energy) / batch.ptr.diff(), out["forces"] - batch.forces


def far_end(charges: Tensor, batch: Batch) -> list[list[str]]:
    """Mean charges of the hydrogen atom farthest from the others with its carbon atoms."""
    rows = []
    for ion, count in itertools.product((0, 1), (2, 5)):
        found = []
        for i in (batch.charge.round() == ion).nonzero()[:, 0].tolist():
            own = slice(int(batch.ptr[i]), int(batch.ptr[i + 1]))
            apart = torch.cdist(batch.pos[own], batch.pos[own])
            hydrogen = batch.atomic_numbers[own] == 1
            last = (apart[:, hydrogen].sum(dim=1) * hydrogen).argmax()
            near = apart[last].argsort()[:count]
            found.append([float(values[own][near].sum()) for values in (charges, batch.hirshfeld)])
        means = zip(np.mean(found, axis=0), np.std(found, axis=0), strict=True)
        name = f"{('C10H2', 'C10H3+')[ion]}, C{count - 1}H"
        rows.append([name, *(f"{mean:.3f} ± {spread:.3f}" for mean, spread in means)])
    return rows


def dimers(file: Path) -> tuple[list[list[Data]], Tensor, Tensor, list[str]]:
    """AB, A and B, interaction energies and SAPT components, eV, and names of the systems."""
    with np.load(file, allow_pickle=False) as arrays:
        held = dict(arrays)
    found, names, end = [], [], 0
    for count, first in zip(held["natoms"].astype(int), held["num_a"].astype(int), strict=True):
        pos, numbers = (held[name][end : end + count] for name in ("pos", "numbers"))
        parts = slice(None), slice(first), slice(first, None)
        found.append([graph(numbers[part], pos[part]) for part in parts])
        pair = (Symbols(numbers[part]).get_chemical_formula() for part in parts[1:])
        names.append("+".join(sorted(pair)))
        end += count
    energies, sapt = (torch.tensor(held[name]).double() * KCAL for name in ("e_int", "sapt"))
    return found, energies, sapt, names


def interactions(model: Potential, pairs: Sequence[Sequence[Data]], parts: bool = False) -> Tensor:
    """E(AB) - E(A) - E(B), eV, (pairs,); with `parts` those of each power, (pairs, powers)."""
    batch = Batch.from_data_list([one for kind in zip(*pairs, strict=True) for one in kind])
    if parts:
        law, geometry = model.long_range, Geometry.of_data(batch)
        charges = law(model(batch)["embedding"], geometry).charges.detach()
        sums = inverse_power_sums(charges, geometry, law.powers, law.cutoff, law.smearing)
        energy = (sum(sums) * law.signs * COULOMB).sum(dim=2)
    else:
        energy = model.energy(batch)
    both, one, other = energy.chunk(3)
    return both - one - other


def run_dimers(options: argparse.Namespace) -> str:
    """Interaction energies of unseen systems, and their components."""
    pairs, energies, sapt, names = dimers(options.file)
    systems = sorted(set(names))
    order = drawn(0, len(systems), len(systems))
    kept = {systems[i] for i in order[len(systems) // 5 :]}
    train = [i for i, name in enumerate(names) if name in kept]
    test = [i for i, name in enumerate(names) if name not in kept]
    model = new(options.start, long_range=[1, 6], messages=2)
    model.energy_std.fill_(UNIT)

    def loss_of(step: int) -> Tensor:
        own = [train[i] for i in drawn(step, 24, len(train))]
        wrong = interactions(model, [pairs[i] for i in own]) - energies[own]
        return nn.functional.huber_loss(wrong / UNIT, torch.zeros_like(wrong), delta=0.1)

    net = trained(f"dimers-{options.start:g}", model, loss_of, options)
    found = []
    with torch.no_grad():
        for first in range(0, len(test), 64):
            some = [pairs[i] for i in test[first : first + 64]]
            total = interactions(net, some)[:, None]
            found.append(torch.cat((total, interactions(net, some, parts=True)), dim=1))
    guess, apart = torch.cat(found), sapt[test][:, 1] < APART
    known = torch.stack((energies, sapt[:, 0], sapt[:, 3]), dim=1)[test]
    lines = []
    labels = ("interaction energy", "1/r and electrostatics", "1/r^6 and dispersion")
    for column, label in enumerate(labels):
        row = [label]
        for own in (torch.ones_like(apart), apart):
            a, b = guess[own, column], known[own, column]
            row += [f"{1e3 * x:.1f}" for x in ((a - b).abs().mean(), b.abs().mean())]
            related = torch.corrcoef(torch.stack((a, b)))[0, 1]
            row += [f"{x:.2f}" for x in ((a @ b) / (b @ b), related)]
        lines.append(row)
    head = [f"{what}{of}" for of in ("", ", apart") for what in ("MAE, meV", "size", "slope", "r")]
    new_systems = len(systems) - len(kept)
    text = f"test: {len(test)} dimers of {new_systems} systems, {int(apart.sum())} of them apart"
    return f"{text}\n\n{markdown(['', *head], lines)}"


@guarded
def main(words: list[str] | None = None) -> None:
    parser = described(__doc__)
    parser.add_argument("what", choices=("chains", "dimers"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/charges"))
    parser.add_argument("--seconds", type=float, default=300.0, help="CPU time of each model")
    parser.add_argument("--cutoff", type=float, default=3.0, help="of local terms of chains, Å")
    parser.add_argument("--start", type=float, default=10.0, help="factor of initial charges")
    options = parser.parse_args(words)
    print((run_chains if options.what == "chains" else run_dimers)(options))


if __name__ == "__main__":
    sys.exit(main())
