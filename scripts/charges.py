"""Latent charges of a potential against quantum chemistry: charged chains and neutral dimers.

    python scripts/charges.py chains carbon_chain.extxyz.xz --out runs/charges --seconds 240
    python scripts/charges.py dimers sapt_dimers.npz --out runs/charges --seconds 600

chains: C10H2 and C10H3+ (Ko et al., Nat. Commun. 12, 398, 2021), energies, forces and Hirshfeld
charges. One potential with total charges and 1/r, and the same one without, learn both molecules.
dimers: interaction energies of neutral dimers and their SAPT parts (doi:10.1063/5.0204064). One
potential learns E(AB) - E(A) - E(B). Dimers of the same two formulas are one system, which is in
the training set or in the test set.

--seconds is CPU time for each model. A run that was stopped goes on when it is started again.
"""

from __future__ import annotations

import argparse
import io
import lzma
import math
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
import torch
from ase.data import chemical_symbols
from ase.formula import Formula
from kit.rows import markdown
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from molflt.graph import Potential
from molflt.graph.geometry import Geometry
from molflt.graph.long_range import COULOMB, inverse_power_sums

KCAL = 0.043364115  # eV, of 1 kcal/mol
UNIT = 0.1  # eV, of interaction energies
APART = 1e-3  # eV, of exchange: molecules of dimers with less do not overlap
SIZES = {"dim": 64, "heads": 4, "ffn_dim": 128, "num_features": 16, "layers": 1, "messages": 2}
LOCAL = {"radial_basis": 0, "far_field": False, "refinements": 1}
RATE, DECAY, EVERY = 2e-3, 0.99, 100  # learning rate, of averaged weights, steps between copies

Loss = Callable[[Potential, int], Tensor]


def fit(path: Path, model: Potential, loss: Loss, seconds: float) -> Potential:
    """Averaged weights after some CPU seconds; `path` keeps the state every 100 steps."""
    average = deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=1e-3)
    parts = {"model": model, "average": average, "optimizer": optimizer}
    step, spent = 0, 0.0
    if path.is_file():
        held = torch.load(path, weights_only=True)
        step, spent = held["step"], held["spent"]
        for name, part in parts.items():
            part.load_state_dict(held[name])
    start = time.process_time() - spent
    while spent < seconds:
        share = min(1.0, spent / seconds)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 50) * (1 + math.cos(math.pi * share)) / 2
        optimizer.zero_grad()
        found = loss(model.train(), step)
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, 1 - min(DECAY, (step + 1) / (step + 10)))
        step, spent = step + 1, time.process_time() - start
        if step % EVERY == 0 or spent >= seconds:
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save(state | {"step": step, "spent": spent}, path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)
            print(f"{path.stem}: step {step}, {spent:.0f} s, loss {found.item():.4f}", flush=True)
    return average.eval()


def drawn(step: int, count: int, of: int) -> list[int]:
    """Different numbers below `of`, the same ones for each step."""
    return torch.randperm(of, generator=torch.Generator().manual_seed(step))[:count].tolist()


def graph(numbers: Any, pos: Any, **labels: Tensor) -> Data:
    """A molecule in the precision of training."""
    pos = torch.as_tensor(np.asarray(pos), dtype=torch.float32)
    return Data(atomic_numbers=torch.as_tensor(np.asarray(numbers)).long(), pos=pos, **labels)


# --- chains


def chains(file: Path) -> list[Data]:
    """Frames with energy, forces, total charge and Hirshfeld charges."""
    text = io.StringIO(lzma.decompress(file.read_bytes()).decode())
    frames = []
    for atoms in ase.io.read(text, ":", format="extxyz"):
        labels = {
            "energy": torch.tensor([atoms.get_potential_energy()], dtype=torch.float64),
            "forces": torch.tensor(atoms.get_forces(), dtype=torch.float32),
            "charge": torch.tensor([float(atoms.info["total_charge"])]),
            "hirshfeld": torch.tensor(atoms.arrays["dft_charge"]),
        }
        frames.append(graph(atoms.numbers, atoms.positions, **labels))
    return frames


def chain_model(charged: bool, train: Sequence[Data], cutoff: float) -> Potential:
    """A new one, with energies of the elements that fit the training set."""
    torch.manual_seed(0)
    options = {"long_range": [1], "total_charge": True} if charged else {}
    model = Potential(near_field=cutoff, neighbor_cutoff=cutoff, **SIZES, **LOCAL, **options)
    counts = torch.stack([one.atomic_numbers.bincount(minlength=119) for one in train]).double()
    energies = torch.cat([one.energy for one in train])
    model.element_energies.copy_(torch.linalg.lstsq(counts, energies, driver="gelsd").solution)
    model.energy_std.fill_(float(torch.cat([one.forces for one in train]).square().mean().sqrt()))
    return model


def of_chains(frames: Sequence[Data], charged: bool) -> Batch:
    """A batch; a model without charges sees neutral molecules."""
    batch = Batch.from_data_list(list(frames))
    if not charged:
        batch.charge = torch.zeros_like(batch.charge)
    return batch


def run_chains(options: argparse.Namespace) -> None:
    frames = chains(options.file)
    order = torch.randperm(len(frames), generator=torch.Generator().manual_seed(0)).tolist()
    train, test = ([frames[i] for i in part] for part in (order[:100], order[100:]))
    lines, mean = [], torch.cat([one.energy for one in train])
    for charged in (False, True):
        name = "with charges" if charged else "without"

        def loss(model: Potential, step: int, charged: bool = charged) -> Tensor:
            batch = of_chains([train[i] for i in drawn(step, 10, len(train))], charged)
            out, unit = model(batch), model.energy_std
            energy = (out["energy"] - batch.energy) / batch.ptr.diff()
            return (10 * energy.abs().mean() + (out["forces"] - batch.forces).abs().mean()) / unit

        state = options.out / f"chains-{options.cutoff:g}-{name.replace(' ', '-')}.pt"
        model = fit(state, chain_model(charged, train, options.cutoff), loss, options.seconds)
        batch = of_chains(test, charged)
        out = model(batch)
        row = [name]
        for ion in (0, 1, None):
            own = torch.ones(len(test)).bool()
            if ion is not None:
                own = torch.cat([one.charge for one in test]).round() == ion
            atoms = own[batch.batch]
            energy = ((out["energy"] - batch.energy) / batch.ptr.diff())[own].abs().mean()
            forces = (out["forces"] - batch.forces)[atoms].abs().mean()
            row += [f"{1e3 * energy:.2f}", f"{1e3 * forces:.0f}"]
        lines.append(row)
    head = [f"{what}, {of}" for of in ("C10H2", "C10H3+", "all") for what in ("meV/atom", "meV/Å")]
    print(f"{len(train)} frames for training, {len(test)} for the test; {mean.std():.2f} eV")
    print(markdown(["model", *head], lines))
    print(markdown(["end of the chain", "charges", "Hirshfeld"], far_end(out["charges"], batch)))


def far_end(charges: Tensor, batch: Batch) -> list[list[str]]:
    """Mean charges of the carbon atoms and the hydrogen atom farthest from the other ones."""
    rows = []
    for ion, name in ((0, "C10H2"), (1, "C10H3+")):
        for count in (2, 5):
            means = []
            for values in (charges, batch.hirshfeld):
                found = []
                for i in (batch.charge.round() == ion).nonzero()[:, 0].tolist():
                    own = slice(int(batch.ptr[i]), int(batch.ptr[i + 1]))
                    apart = torch.cdist(batch.pos[own], batch.pos[own])
                    hydrogen = batch.atomic_numbers[own] == 1
                    last = (apart[:, hydrogen].sum(dim=1) * hydrogen).argmax()
                    found.append(float(values[own][apart[last].argsort()[:count]].sum()))
                means.append(f"{np.mean(found):.3f} ± {np.std(found):.3f}")
            rows.append([f"{name}, C{count - 1}H", *means])
    return rows


# --- dimers


def dimers(file: Path) -> tuple[list[list[Data]], Tensor, Tensor, list[str]]:
    """AB, A and B, interaction energies and SAPT parts, eV, and names of the systems."""
    held = dict(np.load(file, allow_pickle=False))
    found, names, end = [], [], 0
    for count, first in zip(held["natoms"].astype(int), held["num_a"].astype(int), strict=True):
        pos, numbers = (held[name][end : end + count] for name in ("pos", "numbers"))
        parts = slice(None), slice(first), slice(first, None)
        found.append([graph(numbers[part], pos[part]) for part in parts])
        pair = (
            Formula.from_list([chemical_symbols[z] for z in numbers[part]]) for part in parts[1:]
        )
        names.append("+".join(sorted(one.format("hill") for one in pair)))
        end += count
    energies = (torch.tensor(held[name]).double() * KCAL for name in ("e_int", "sapt"))
    return found, *energies, names


def interactions(model: Potential, pairs: Sequence[Sequence[Data]], parts: bool = False) -> Tensor:
    """E(AB) - E(A) - E(B), eV, (pairs,); with `parts` those of each power, (pairs, powers)."""
    batch = Batch.from_data_list([one for kind in zip(*pairs, strict=True) for one in kind])
    if not parts:
        energy = model.energy(batch)
    else:
        law, geometry = model.long_range, Geometry.of_data(batch)
        charges = law(model(batch)["embedding"], geometry).charges.detach()
        sums = inverse_power_sums(charges, geometry, law.powers, law.cutoff, law.smearing)
        energy = (sum(sums) * law.signs * COULOMB).sum(dim=2)
    both, one, other = energy.chunk(3)
    return both - one - other


def run_dimers(options: argparse.Namespace) -> None:
    pairs, energies, sapt, names = dimers(options.file)
    systems = sorted(set(names))
    draw = torch.Generator().manual_seed(0)
    kept = {systems[i] for i in torch.randperm(len(systems), generator=draw)[len(systems) // 5 :]}
    train, test = (
        [i for i, name in enumerate(names) if (name in kept) == own] for own in (True, False)
    )
    torch.manual_seed(0)
    model = Potential(long_range=[1, 6], near_field=5.0, **SIZES, **LOCAL)
    model.energy_std.fill_(UNIT)

    def loss(model: Potential, step: int) -> Tensor:
        own = [train[i] for i in drawn(step, 24, len(train))]
        wrong = interactions(model, [pairs[i] for i in own]) - energies[own]
        return nn.functional.huber_loss(wrong / UNIT, torch.zeros_like(wrong), delta=0.1)

    model = fit(options.out / "dimers.pt", model, loss, options.seconds)
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
    print(
        f"{len(train)} dimers of {len(kept)} systems for training, {len(test)} of "
        f"{len(systems) - len(kept)} for the test, {int(apart.sum())} of them apart"
    )
    head = [f"{what}{of}" for of in ("", ", apart") for what in ("MAE, meV", "size", "slope", "r")]
    print(markdown(["", *head], lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("chains", "dimers"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/charges"))
    parser.add_argument("--seconds", type=float, default=300.0, help="CPU time of each model")
    parser.add_argument("--cutoff", type=float, default=3.0, help="of all that is local, chains, Å")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    {"chains": run_chains, "dimers": run_dimers}[options.what](options)


if __name__ == "__main__":
    main()
