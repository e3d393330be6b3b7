"""Compare the latent charges of a potential with quantum chemistry: charged chains, neutral dimers.

    python scripts/charges.py chains carbon_chain.extxyz.xz --out runs/charges --seconds 240
    python scripts/charges.py dimers sapt_dimers.npz --out runs/charges --seconds 600

chains: C10H2 and C10H3+ (Ko et al., Nat. Commun. 12, 398, 2021) with energies, forces and Hirshfeld
charges. A potential learns both molecules, with and without total charges and 1/r.
dimers: interaction energies of neutral dimers and their SAPT parts (doi:10.1063/5.0204064). A
potential learns E(AB) - E(A) - E(B). Dimers of the same two formulas are one system, which is in
the training set or in the test set.

--seconds is the CPU time of each model. The same command continues a run that was stopped.
"""

import argparse
import itertools
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase.symbols import Symbols
from kit.budget import CpuBudget, resumed_steps
from kit.rows import markdown
from kit.words import described
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from molflt.data.structures.ase_files import AseStructures
from molflt.graph import Potential
from molflt.graph.geometry import Geometry
from molflt.graph.long_range import COULOMB, inverse_power_sums

KCAL = 0.043364115  # eV, of 1 kcal/mol
UNIT = 0.1  # eV, of interaction energies
APART = 1e-3  # eV, of exchange: molecules with less do not overlap
SIZES = {"dim": 64, "heads": 4, "ffn_dim": 128, "num_features": 16, "layers": 1, "refinements": 1}
RATE, DECAY = 2e-3, 0.99  # learning rate; decay of the average of weights

Loss = Callable[[Potential, int], Tensor]


def fit(path: Path, model: Potential, loss: Loss, seconds: float) -> Potential:
    """Averaged weights after a budget of CPU seconds; `path` is the file of `resumed_steps`."""
    average, budget = deepcopy(model), CpuBudget(seconds)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=1e-3)
    parts = {"model": model, "average": average, "optimizer": optimizer}
    for step in resumed_steps(path, parts, budget):
        for group in optimizer.param_groups:
            decay = (1 + math.cos(math.pi * budget.share)) / 2
            group["lr"] = RATE * min(1.0, (step + 1) / 50) * decay
        optimizer.zero_grad()
        found = loss(model.train(), step)
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, 1 - min(DECAY, (step + 1) / (step + 10)))
        if step % 100 == 0:
            print(f"{path.stem}: step {step}, {budget.used:.0f} s, loss {found.item():.4f}")
    return average.eval()


def new(start: float, **options: Any) -> Potential:
    """A potential without a far field; `start` multiplies its initial latent charges."""
    torch.manual_seed(0)
    model = Potential(radial_basis=0, far_field=False, **SIZES, **options)
    if model.long_range is not None:
        model.long_range.charge.weight.data.mul_(start)
    return model


def drawn(step: int, count: int, of: int) -> list[int]:
    """Different numbers below `of`, which depend on the step only."""
    return torch.randperm(of, generator=torch.Generator().manual_seed(step))[:count].tolist()


def graph(numbers: Any, pos: Any, **labels: Tensor) -> Data:
    """A molecule as training data."""
    return Data(atomic_numbers=torch.as_tensor(numbers).long(), pos=torch.as_tensor(pos), **labels)


def chains(file: Path) -> list[Data]:
    """Frames with energy, forces, total charge and Hirshfeld charges."""
    held, frames = AseStructures(file, tags="any", keep_atoms=True), []
    for one, atoms in zip(held, held.atoms, strict=True):
        labels = {name: one[name] for name in ("energy", "forces", "charge")}
        labels["hirshfeld"] = torch.tensor(atoms.arrays["dft_charge"])
        frames.append(graph(one.atomic_numbers, one.pos, **labels))
    return frames


def run_chains(options: argparse.Namespace) -> None:
    """Prints the errors of both potentials, and the charges of the end of the chain."""
    frames = chains(options.file)
    order = torch.randperm(len(frames), generator=torch.Generator().manual_seed(0)).tolist()
    train, test = ([frames[i] for i in part] for part in (order[:100], order[100:]))
    counts = torch.stack([one.atomic_numbers.bincount(minlength=119) for one in train]).double()
    energies, forces = (torch.cat([one[name] for one in train]) for name in ("energy", "forces"))
    lines = []
    for name, extra in {"without": {}, "with": {"long_range": [1], "total_charge": True}}.items():

        def of(some: Sequence[Data], neutral: bool = not extra) -> Batch:
            batch = Batch.from_data_list(list(some))
            batch.charge = torch.zeros_like(batch.charge) if neutral else batch.charge
            return batch

        def loss(model: Potential, step: int, of: Callable[..., Batch] = of) -> Tensor:
            batch = of([train[i] for i in drawn(step, 10, len(train))])
            out, unit = model(batch), model.energy_std
            energy = (out["energy"] - batch.energy) / batch.ptr.diff()
            return (10 * energy.abs().mean() + (out["forces"] - batch.forces).abs().mean()) / unit

        near = {"near_field": options.cutoff, "neighbor_cutoff": options.cutoff}
        model = new(options.start, messages=1, **near, **extra)
        model.element_energies.copy_(torch.linalg.lstsq(counts, energies, driver="gelsd")[0])
        model.energy_std.fill_(float(forces.square().mean().sqrt()))
        state = options.out / f"chains-{options.cutoff:g}-{name}.pt"
        model, batch = fit(state, model, loss, options.seconds), of(test)
        out = model(batch)
        row, ions = [name], torch.cat([one.charge for one in test]).round()
        for own in (ions == 0, ions == 1, ions.isfinite()):
            energy = ((out["energy"] - batch.energy) / batch.ptr.diff())[own].abs().mean()
            forces = (out["forces"] - batch.forces)[own[batch.batch]].abs().mean()
            row += [f"{1e3 * energy:.2f}", f"{1e3 * forces:.0f}"]
        lines.append(row)
    head = [f"{what}, {of}" for of in ("C10H2", "C10H3+", "all") for what in ("meV/atom", "meV/Å")]
    print(f"{len(train)} frames for training, {len(test)} for the test")
    print(markdown(["model", *head], lines))
    print(markdown(["end of the chain", "charges", "Hirshfeld"], far_end(out["charges"], batch)))


def far_end(charges: Tensor, batch: Batch) -> list[list[str]]:
    """Mean charges of the hydrogen atom farthest from the others, with its nearest carbon atoms."""
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
    """AB, A and B, interaction energies and SAPT parts, eV, and names of the systems."""
    held = dict(np.load(file, allow_pickle=False))
    found, names, end = [], [], 0
    for count, first in zip(held["natoms"].astype(int), held["num_a"].astype(int), strict=True):
        pos, numbers = (held[name][end : end + count] for name in ("pos", "numbers"))
        parts = slice(None), slice(first), slice(first, None)
        found.append([graph(numbers[part], pos[part]) for part in parts])
        pair = (Symbols(numbers[part]).get_chemical_formula() for part in parts[1:])
        names.append("+".join(sorted(pair)))
        end += count
    energies = (torch.tensor(held[name]).double() * KCAL for name in ("e_int", "sapt"))
    return found, *energies, names


def interactions(model: Potential, pairs: Sequence[Sequence[Data]], parts: bool = False) -> Tensor:
    """E(AB) - E(A) - E(B), eV, (pairs,); with `parts` the part of each power, (pairs, powers)."""
    batch = Batch.from_data_list([one for kind in zip(*pairs, strict=True) for one in kind])
    energy = None if parts else model.energy(batch)
    if parts:
        law, geometry = model.long_range, Geometry.of_data(batch)
        charges = law(model(batch)["embedding"], geometry).charges.detach()
        sums = inverse_power_sums(charges, geometry, law.powers, law.cutoff, law.smearing)
        energy = (sum(sums) * law.signs * COULOMB).sum(dim=2)
    both, one, other = energy.chunk(3)
    return both - one - other


def run_dimers(options: argparse.Namespace) -> None:
    """Prints the errors of interaction energies and of their parts."""
    pairs, energies, sapt, names = dimers(options.file)
    systems = sorted(set(names))
    draw = torch.Generator().manual_seed(0)
    kept = {systems[i] for i in torch.randperm(len(systems), generator=draw)[len(systems) // 5 :]}
    train = [i for i, name in enumerate(names) if name in kept]
    test = sorted({*range(len(names))} - {*train})
    model = new(options.start, long_range=[1, 6], messages=2)
    model.energy_std.fill_(UNIT)

    def loss(model: Potential, step: int) -> Tensor:
        own = [train[i] for i in drawn(step, 24, len(train))]
        wrong = interactions(model, [pairs[i] for i in own]) - energies[own]
        return nn.functional.huber_loss(wrong / UNIT, torch.zeros_like(wrong), delta=0.1)

    model = fit(options.out / f"dimers-{options.start:g}.pt", model, loss, options.seconds)
    found = []
    with torch.no_grad():
        for first in range(0, len(test), 64):
            some = [pairs[i] for i in test[first : first + 64]]
            total = interactions(model, some)[:, None]
            found.append(torch.cat((total, interactions(model, some, parts=True)), dim=1))
    found, apart = torch.cat(found), sapt[test][:, 1] < APART
    lines = []
    for label, column, known in (
        ("interaction energy", 0, energies[test]),
        ("1/r and electrostatics", 1, sapt[test][:, 0]),
        ("1/r^6 and dispersion", 2, sapt[test][:, 3]),
    ):
        row = [label]
        for own in (torch.ones_like(apart), apart):
            a, b = found[own, column], known[own]
            slope, related = (a @ b) / (b @ b), torch.corrcoef(torch.stack((a, b)))[0, 1]
            row += [f"{1e3 * x:.1f}" for x in ((a - b).abs().mean(), b.abs().mean())]
            row += [f"{slope:.2f}", f"{related:.2f}"]
        lines.append(row)
    count = len(systems) - len(kept), int(apart.sum())
    print(f"test: {len(test)} dimers of {count[0]} systems, {count[1]} of them apart")
    head = [f"{what}{of}" for of in ("", ", apart") for what in ("MAE, meV", "size", "slope", "r")]
    print(markdown(["", *head], lines))


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("what", choices=("chains", "dimers"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/charges"))
    parser.add_argument("--seconds", type=float, default=300.0, help="CPU time of each model")
    parser.add_argument("--cutoff", type=float, default=3.0, help="of all that is local, chains, Å")
    parser.add_argument("--start", type=float, default=10.0, help="factor of the first charges")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    {"chains": run_chains, "dimers": run_dimers}[options.what](options)


if __name__ == "__main__":
    main()
