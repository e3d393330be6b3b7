"""Errors of potentials with and without long-range terms for pairs of distant molecules.

The data are train-id*.xyz and test-id*.xyz of the LODE dimers (Huguenin-Dumittan et al., J. Phys.
Chem. Lett. 14, 9612, 2023), taken from the cace-lr-fit repository, CC BY-NC 4.0. Beyond 4 Å, the
potential contains only terms 1 / r^p between latent charges. Its features remain random. Charges
and local energies are linear in the features and are fitted by regularized least squares. Powers,
width, weights and penalty are chosen for the smallest error at the largest training distances,
which are held out.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ase.io import read as read_frames
from kit.rows import Rows, markdown, names, pick
from torch import Tensor
from torch_geometric.data import Batch, Data

from molflt.graph import EnergyRegressor, Potential
from molflt.graph.geometry import Geometry
from molflt.graph.long_range import COULOMB, inverse_power_sums

CUTOFF = 4.0  # cutoff of all local terms, Å
HELD_OUT = (2, 3)  # numbers of held-out training distances
POWERS = ((1,), (1, 6), (1, 4, 6))
WIDTHS = (24, 64)
FLOORS = (1e-3, 1e-4)  # eV; errors are divided by |E| + floor
PENALTIES = (1e-4, 1e-5)  # factors of the squared weights
QUICK = {"seeds": 1, "files": 1, "steps": 5, "tries": 1}


class Setting(NamedTuple):
    """Settings that are chosen by validation."""

    powers: tuple[int, ...]
    width: int
    floor: float
    penalty: float

    def __str__(self) -> str:
        law = " + ".join(f"1/r^{power}" for power in self.powers) or "local"
        return f"{law}, width {self.width}, floor {self.floor:g} eV, penalty {self.penalty:g}"


class Dimers(NamedTuple):
    """Pairs of rigid molecules; the last `graphs` are the two molecules of each class."""

    graphs: list[Data]
    kind: Tensor  # (pairs,) class
    energy: Tensor  # (pairs,) eV, E(AB) - E(A) - E(B)
    distance: Tensor  # (pairs,) Å
    test: Tensor  # (pairs,) bool
    labels: list[str]  # by class

    def binding(self, energy: Tensor) -> Tensor:
        """Returns values of pairs minus values of their molecules; `energy` is (graphs, ...)."""
        alone = energy[len(self.kind) :].unflatten(0, (-1, 2)).sum(dim=1)
        return energy[: len(self.kind)] - alone[self.kind]

    def held_out(self, count: int) -> Tensor:
        """Marks the `count` largest training distances of each class, (pairs,) bool."""
        held = torch.zeros_like(self.test)
        for kind in range(len(self.labels)):
            own = ((self.kind == kind) & ~self.test).nonzero()[:, 0]
            held[own[self.distance[own].argsort()[-count:]]] = True
        return held

    def relative(self, predicted: Tensor, where: Tensor) -> float:
        """Returns the error divided by the error of predicting 0, averaged over classes."""
        wrong = (predicted - self.energy).abs()
        own = [where & (self.kind == kind) for kind in range(len(self.labels))]
        return statistics.fmean(float(wrong[k].sum() / self.energy[k].abs().sum()) for k in own)


def read(folder: Path, limit: int | None = None) -> Dimers:
    """Reads all pairs of both splits."""
    splits = []
    for split in ("train", "test"):
        files = sorted(folder.glob(f"{split}-id*.xyz"))[:limit]
        if not files:
            raise FileNotFoundError(f"{folder}: no {split}-id*.xyz; see --help")
        splits.append([read_frames(file, ":") for file in files])
    pairs, alone, labels = [], [], []
    for kind, (train, test) in enumerate(zip(*splits, strict=True)):
        second = int(train[0].info["indexB"])  # first atom of the second molecule
        alone += [_graph(train[0][:second]), _graph(train[0][second:])]
        labels.append(str(train[0].info["label"]))
        pairs += [(atoms, kind, False) for atoms in train]
        pairs += [(atoms, kind, True) for atoms in test]
    atoms, kinds, tests = zip(*pairs, strict=True)
    energy, distance = (
        torch.tensor([float(one.info[key]) for one in atoms], dtype=torch.float64)
        for key in ("inter_energy", "distance")
    )
    graphs = [*map(_graph, atoms), *alone]
    return Dimers(graphs, torch.tensor(kinds), energy, distance, torch.tensor(tests), labels)


def _graph(atoms: Any) -> Data:
    return Data(
        atomic_numbers=torch.tensor(atoms.numbers, dtype=torch.long),
        pos=torch.tensor(atoms.positions),
        cell=torch.tensor(atoms.cell.array)[None],
        pbc=torch.tensor(atoms.pbc)[None],
        tags=torch.ones(len(atoms), dtype=torch.long),
    )


def laws(graphs: Sequence[Data], powers: Sequence[int]) -> list[Tensor]:
    """Returns d^2 E / dq_i dq_j of each graph, including images, (powers, atoms, atoms), eV."""
    found = []
    for graph in graphs:
        count = len(graph.pos)
        q = torch.eye(count, dtype=torch.float64)[:, None].repeat(1, len(powers), 1)
        q.requires_grad_()
        parts = inverse_power_sums(q, Geometry.of_data(graph), powers, 8.0, 1.0)
        (slope,) = torch.autograd.grad(COULOMB * sum(part.sum() for part in parts), q)
        found.append(slope.movedim(1, 0))
    return found


def potential(setting: Setting, seed: int) -> Potential:
    """Returns a potential with random features."""
    torch.manual_seed(seed)
    options: dict[str, Any] = {"layers": 1, "refinements": 1, "num_features": 16}
    options |= {"ffn_dim": setting.width, "far_field": False, "radial_basis": 12}
    options |= {"near_field": CUTOFF, "neighbor_cutoff": CUTOFF}
    if setting.powers:  # the charges of an ion do not sum to 0
        options |= {"long_range": list(setting.powers), "long_range_channels": 1}
        options["long_range_neutral"] = False
    return Potential(setting.width, 4, **options).double().eval()


class Design(NamedTuple):
    """Binding energies sum_p w_p . Q_p w_p + L . a for weights w_p and a."""

    quadratic: Tensor  # (pairs, powers, width, width)
    linear: Tensor  # (pairs, width)

    @classmethod
    @torch.no_grad()
    def of(cls, model: Potential, data: Dimers, kernels: Sequence[Tensor]) -> "Design":
        """Returns the design of a model's features; `kernels` are the `laws` of its powers."""
        batch = Batch.from_data_list(data.graphs)
        h = EnergyRegressor.forward(model, batch)["embedding"]
        signs = [] if model.long_range is None else model.long_range.signs[:, 0].tolist()
        parts = h.split(batch.ptr.diff().tolist())
        forms = [
            torch.einsum("ia,pij,jb,p->pab", own, law, own, h.new_tensor(signs)) / 2
            for own, law in zip(parts, kernels, strict=True)
        ]
        local = torch.stack(
            [own.sum(dim=0) for own in model.readout.mlp[:2](h).split(batch.ptr.diff().tolist())]
        )
        return cls(data.binding(torch.stack(forms)), data.binding(local))

    def __call__(self, w: Tensor, a: Tensor) -> Tensor:
        """Returns (pairs,) energies, eV, for weights (powers, width) and (width,)."""
        return torch.einsum("pa,fpab,pb->f", w, self.quadratic, w) + self.linear @ a

    def slopes(self, w: Tensor) -> Tensor:
        """Returns the derivatives with respect to all weights, (pairs, weights)."""
        charges = 2 * torch.einsum("fpab,pb->fpa", self.quadratic, w)
        return torch.cat((charges.flatten(1), self.linear), dim=1)


def solve(
    design: Design, energy: Tensor, unit: Tensor, start: Tensor, penalty: float, steps: int
) -> tuple[Tensor, Tensor]:
    """Returns weights that minimize the mean square of (E - energy) / unit + penalty |weights|^2.

    Each Levenberg-Marquardt step solves the damped linearized problem. The damping increases after
    a step that increases the cost, and decreases after other steps.
    """
    share = 1 / (unit * len(energy) ** 0.5)
    w, a = start, torch.zeros_like(design.linear[0])

    def cost(w: Tensor, a: Tensor) -> float:
        rest = (design(w, a) - energy) * share
        return float(rest @ rest + penalty * (w.square().sum() + a @ a))

    damping, now = 1.0, cost(w, a)
    for _ in range(steps):
        rest, jacobian = (design(w, a) - energy) * share, design.slopes(w) * share[:, None]
        flat, gram = torch.cat((w.flatten(), a)), jacobian @ jacobian.mT
        while damping < 1e12:
            whole = penalty + damping
            back = flat * (penalty / whole)
            inverse = gram + whole * torch.eye(len(energy)).double()
            ahead = jacobian.mT @ torch.linalg.solve(inverse, rest - jacobian @ back)
            moved = flat - back - ahead
            trial = moved[: w.numel()].view_as(w), moved[w.numel() :]
            after = cost(*trial)
            damping = damping / 5 if after < now else damping * 4
            if after < now:
                break
        if damping >= 1e12:
            break
        gain, now, (w, a) = now - after, after, trial
        if gain < 1e-6 * now:
            break
    return w, a


def fitted(
    model: Potential, design: Design, data: Dimers, setting: Setting, where: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """Returns the weights fitted to the pairs `where`."""
    part = Design(design.quadratic[where], design.linear[where])
    start = torch.zeros(0, setting.width, dtype=torch.float64)
    if model.long_range is not None:
        start = 10 * model.long_range.charge.weight.detach()
    energy = data.energy[where]
    return solve(part, energy, energy.abs() + setting.floor, start, setting.penalty, steps)


@torch.no_grad()
def predicted(model: Potential, data: Dimers, w: Tensor, a: Tensor) -> Tensor:
    """Returns the binding energies (pairs,) that the potential computes with these weights."""
    first, last = model.readout.mlp[2], model.readout.factor
    first.weight.copy_(a[None])
    first.bias.zero_()
    last.weight.fill_(1.0)
    if model.long_range is not None:
        model.long_range.charge.weight.copy_(w)
    energies = [model.energy(Batch.from_data_list([graph])) for graph in data.graphs]
    return data.binding(torch.cat(energies))


class Trial:
    """Potentials with the same setting and different seeds."""

    def __init__(
        self, data: Dimers, kernels: Mapping[int, Sequence[Tensor]], setting: Setting, seeds: int
    ) -> None:
        self.data, self.setting = data, setting
        own = [torch.stack(x) for x in zip(*(kernels[p] for p in setting.powers), strict=True)]
        own = own or [x[None][:0] for x in kernels[1]]
        self.models = [potential(setting, seed) for seed in range(seeds)]
        self.designs = [Design.of(model, data, own) for model in self.models]

    def guess(self, known: Tensor, steps: int, by_model: bool = False) -> Tensor:
        """Returns the mean binding energies (pairs,) of potentials fitted to the known pairs, eV.

        With `by_model`, the energies come from the potentials rather than from the designs.
        """
        found = []
        for model, design in zip(self.models, self.designs, strict=True):
            weights = fitted(model, design, self.data, self.setting, known, steps)
            one = predicted(model, self.data, *weights) if by_model else design(*weights)
            found.append(one)
        return torch.stack(found).mean(dim=0)

    def score(self, steps: int) -> float:
        """Returns the error at held-out training distances, relative to predicting 0."""
        found = []
        for count in HELD_OUT:
            held = self.data.held_out(count)
            guess = self.guess(~(held | self.data.test), steps)
            found.append(self.data.relative(guess, held))
        print(f"{self.setting}: {statistics.fmean(found):.3f}", flush=True)
        return statistics.fmean(found)


def measure(
    data: Path, seeds: int = 3, steps: int = 100, files: int = 10**9, tries: int = 10**9
) -> Rows:
    """Returns a row for each variant and pair: the mean energy of `seeds` potentials, eV."""
    dimers = read(data, files)
    powers = sorted(set(itertools.chain(*POWERS)))
    kernels = dict(zip(powers, zip(*laws(dimers.graphs, powers), strict=True), strict=True))
    columns = (dimers.test, dimers.kind, dimers.distance, dimers.energy)
    rows: Rows = []
    for local in (True, False):
        choices = itertools.product(((),) if local else POWERS, WIDTHS, FLOORS, PENALTIES)
        settings = itertools.islice(itertools.starmap(Setting, choices), tries)
        trials = (Trial(dimers, kernels, setting, seeds) for setting in settings)
        best = min(trials, key=lambda trial: trial.score(steps))
        guess = best.guess(~dimers.test, steps, by_model=True)
        rows += [
            {
                "variant": "local" if local else str(best.setting),
                "split": "test" if test else "train",
                "class": dimers.labels[kind],
                "distance_A": round(distance, 3),
                "energy_eV": energy,
                "predicted_eV": value,
            }
            for test, kind, distance, energy, value in zip(
                *(x.tolist() for x in (*columns, guess)), strict=True
            )
        ]
    return rows


def errors(rows: Rows) -> dict[str, float]:
    """Returns mean absolute errors by class in meV; "all" is the mean over classes."""
    found = {
        label: statistics.fmean(
            1000 * abs(row["predicted_eV"] - row["energy_eV"])
            for row in pick(rows, **{"class": label})
        )
        for label in sorted(names(rows, "class"))
    }
    return {"all": statistics.fmean(found.values())} | found


def table(rows: Rows) -> str:
    """Returns the MAE in meV within and beyond the training distances, by class."""
    zero = [
        {**row, "variant": "energy 0", "predicted_eV": 0.0}
        for row in pick(rows, variant=rows[0]["variant"])
    ]
    lines = []
    for variant in ("energy 0", *names(rows, "variant")):
        own = pick(zero + rows, variant=variant)
        trained, tested = (errors(pick(own, split=split)) for split in ("train", "test"))
        lines.append([variant, f"{trained['all']:.2f}", *(f"{x:.3f}" for x in tested.values())])
    labels = sorted(names(rows, "class"))
    return markdown(["model", "train", "test", *(f"test {label}" for label in labels)], lines)
