"""Two molecules drawn apart: a potential with and without a long range, chosen by validation.

The data are those of long_range.py. The potential sees nothing beyond 4 Å but through 1 / r^p
between its latent charges. Its features are as they were drawn; charges and local energies, which
are linear in them, are fitted by regularized least squares. Powers, width, weights and penalty are
those whose error is least where the farthest of the training distances are held out.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from kit.rows import Promise, Rows, markdown, names, pick
from torch import Tensor
from torch_geometric.data import Batch, Data

from molflt.graph import EnergyRegressor, Potential
from molflt.graph.geometry import Geometry
from molflt.graph.long_range import COULOMB, inverse_power_sums

CUTOFF = 4.0  # Å, of all that is local
HELD_OUT = (2, 3)  # of the training distances of each class, the farthest
POWERS = ((1,), (1, 6), (1, 4, 6))
WIDTHS = (24, 64)
FLOORS = (1e-3, 1e-4)  # eV: errors count in units of |E| + this
PENALTIES = (1e-4, 1e-5)  # of squared weights
STEPS = 100
QUICK = {"seeds": 1, "files": 1, "steps": 5, "tries": 1}


class Setting(NamedTuple):
    """Settings that validation chooses."""

    powers: tuple[int, ...]
    width: int
    floor: float
    penalty: float

    def __str__(self) -> str:
        law = " + ".join(f"1/r^{power}" for power in self.powers) or "local"
        return f"{law}, width {self.width}, floor {self.floor:g} eV, penalty {self.penalty:g}"


class Dimers(NamedTuple):
    """Pairs of rigid molecules, and behind them these molecules, two of each class."""

    graphs: list[Data]
    kind: Tensor  # (pairs,) class of each
    energy: Tensor  # (pairs,) eV, E(AB) - E(A) - E(B)
    distance: Tensor  # (pairs,) Å
    test: Tensor  # (pairs,) bool
    labels: list[str]  # by class

    def binding(self, energy: Tensor) -> Tensor:
        """Differences between pairs and their molecules, from values of graphs (graphs,...)."""
        alone = energy[len(self.kind) :].unflatten(0, (-1, 2)).sum(dim=1)
        return energy[: len(self.kind)] - alone[self.kind]

    def held_out(self, count: int) -> Tensor:
        """The so many farthest training distances of each class: (pairs,) bool."""
        held = torch.zeros_like(self.test)
        for kind in range(len(self.labels)):
            own = ((self.kind == kind) & ~self.test).nonzero()[:, 0]
            held[own[self.distance[own].argsort()[-count:]]] = True
        return held

    def relative(self, predicted: Tensor, where: Tensor) -> float:
        """Mean over classes of the mean absolute error, in units of that of predicting 0."""
        wrong = (predicted - self.energy).abs()
        own = [where & (self.kind == kind) for kind in range(len(self.labels))]
        return statistics.fmean(float(wrong[k].sum() / self.energy[k].abs().sum()) for k in own)


def read(folder: Path, limit: int | None = None) -> Dimers:
    """All pairs of both splits."""
    from ase.io import read as read_frames

    files = sorted(folder.glob("train-id*.xyz"))[:limit]
    if not files:
        raise FileNotFoundError(
            f"{folder}: no train-id*.xyz; give --data the folder of the dimers, see --help"
        )
    pairs, alone, labels = [], [], []
    for kind, file in enumerate(files):
        for split in ("train", "test"):
            frames = read_frames(file.with_name(file.name.replace("train", split)), ":")
            if split == "train":
                second = int(frames[0].info["indexB"])
                alone += [_graph(frames[0][:second]), _graph(frames[0][second:])]
                labels.append(str(frames[0].info["label"]))
            pairs += [(atoms, kind, split == "test") for atoms in frames]
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
    """d^2 E / dq_i dq_j of each graph, with all images: (powers, atoms, atoms) eV each."""
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
    """Returns the picture."""
    torch.manual_seed(seed)
    sizes = {"layers": 1, "refinements": 1, "ffn_dim": setting.width, "num_features": 16}
    charges = {"long_range": list(setting.powers), "long_range_channels": 1}
    charges["long_range_neutral"] = False  # pairs of ions
    return (
        Potential(
            setting.width,
            4,
            far_field=False,
            near_field=CUTOFF,
            neighbor_cutoff=CUTOFF,
            radial_basis=12,
            **(charges if setting.powers else {}),
            **sizes,
        )
        .double()
        .eval()
    )


class Design(NamedTuple):
    """Binding energies as functions of weights: w_p . Q_p w_p + L . a."""

    quadratic: Tensor  # (pairs, powers, width, width)
    linear: Tensor  # (pairs, width)

    @classmethod
    @torch.no_grad()
    def of(cls, model: Potential, data: Dimers, kernels: Sequence[Tensor]) -> Design:
        """Ridge regression on features of a model; `kernels` are those of its powers."""
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
        """Weights of charges (powers, width) and of local energies (width,) -> (pairs,) eV."""
        return torch.einsum("pa,fpab,pb->f", w, self.quadratic, w) + self.linear @ a

    def slopes(self, w: Tensor) -> Tensor:
        """Derivatives by all weights: (pairs, weights)."""
        charges = 2 * torch.einsum("fpab,pb->fpa", self.quadratic, w)
        return torch.cat((charges.flatten(1), self.linear), dim=1)


def solve(
    design: Design, energy: Tensor, unit: Tensor, start: Tensor, penalty: float, steps: int
) -> tuple[Tensor, Tensor]:
    """Weights of least mean square of (E - energy) / unit plus penalty |weights|^2.

    Levenberg and Marquardt's way: each step solves the linearized problem, damped more after a step
    that made it worse and less after one that did not.
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
    """Weights from those pairs alone."""
    part = Design(design.quadratic[where], design.linear[where])
    start = torch.zeros(0, setting.width, dtype=torch.float64)
    if model.long_range is not None:
        start = 10 * model.long_range.charge.weight.detach()
    energy = data.energy[where]
    return solve(part, energy, energy.abs() + setting.floor, start, setting.penalty, steps)


@torch.no_grad()
def predicted(model: Potential, data: Dimers, w: Tensor, a: Tensor) -> Tensor:
    """Binding energies (pairs,) of the potential with these weights, by itself."""
    first, last = model.readout.mlp[2], model.readout.factor
    first.weight.copy_(a[None])
    first.bias.zero_()
    last.weight.fill_(1.0)
    if model.long_range is not None:
        model.long_range.charge.weight.copy_(w)
    energies = [model.energy(Batch.from_data_list([graph])) for graph in data.graphs]
    return data.binding(torch.cat(energies))


def settings(local: bool) -> Iterator[Setting]:
    """All that are tried."""
    powers = ((),) if local else POWERS
    yield from itertools.starmap(Setting, itertools.product(powers, WIDTHS, FLOORS, PENALTIES))


class Trial:
    """Potentials of one setting, drawn several times, and what is known of them."""

    def __init__(
        self, data: Dimers, kernels: Mapping[int, Sequence[Tensor]], setting: Setting, seeds: int
    ) -> None:
        self.data, self.setting = data, setting
        own = [torch.stack(x) for x in zip(*(kernels[p] for p in setting.powers), strict=True)]
        own = own or [x[None][:0] for x in kernels[1]]
        self.models = [potential(setting, seed) for seed in range(seeds)]
        self.designs = [Design.of(model, data, own) for model in self.models]

    def guess(self, known: Tensor, steps: int, by_model: bool = False) -> Tensor:
        """Mean binding energy (pairs,) of potentials fitted to those that are known, eV.

        With `by_model` of the potentials themselves, with these weights, instead of the design.
        """
        found = []
        for model, design in zip(self.models, self.designs, strict=True):
            weights = fitted(model, design, self.data, self.setting, known, steps)
            one = predicted(model, self.data, *weights) if by_model else design(*weights)
            found.append(one)
        return torch.stack(found).mean(dim=0)

    def score(self, steps: int) -> float:
        """Error where the farthest training distances are held out, over that of energy 0."""
        found = []
        for count in HELD_OUT:
            held = self.data.held_out(count)
            guess = self.guess(~(held | self.data.test), steps)
            found.append(self.data.relative(guess, held))
        print(f"{self.setting}: {statistics.fmean(found):.3f}", flush=True)
        return statistics.fmean(found)


def measure(
    data: Path, seeds: int = 3, steps: int = STEPS, files: int = 10**9, tries: int = 10**9
) -> Rows:
    """One row per variant and pair of molecules: mean of potentials drawn `seeds` times, in eV."""
    dimers = read(data, files)
    powers = sorted(set(itertools.chain(*POWERS)))
    kernels = dict(zip(powers, zip(*laws(dimers.graphs, powers), strict=True), strict=True))
    columns = (dimers.test, dimers.kind, dimers.distance, dimers.energy)
    rows: Rows = []
    for local in (True, False):
        trials = (
            Trial(dimers, kernels, setting, seeds)
            for setting in itertools.islice(settings(local), tries)
        )
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


def errors(rows: Rows, variant: str, split: str = "test") -> dict[str, float]:
    """Mean absolute errors by class, meV; those of energy 0 for the variant "energy 0"."""
    zero = variant == "energy 0"
    own = pick(rows, variant=rows[0]["variant"] if zero else variant, split=split)
    found = {}
    for label in sorted(names(own, "class")):
        part = pick(own, **{"class": label})
        wrong = (abs((0 if zero else r["predicted_eV"]) - r["energy_eV"]) for r in part)
        found[label] = 1000 * statistics.fmean(wrong)
    return {"all": statistics.fmean(found.values())} | found


def table(rows: Rows) -> str:
    """MAE in meV within the training distances and beyond them, by class."""
    lines = []
    for variant in ("energy 0", *names(rows, "variant")):
        tested, trained = errors(rows, variant), errors(rows, variant, "train")["all"]
        lines.append([variant, f"{trained:.2f}", *(f"{x:.3f}" for x in tested.values())])
    labels = sorted(names(rows, "class"))
    return markdown(["model", "train", "test", *(f"test {label}" for label in labels)], lines)


def _chosen(rows: Rows) -> str:
    return str(names(rows, "variant")[-1])


def _error(rows: Rows) -> float | None:
    """Mean of all six classes, meV."""
    return errors(rows, _chosen(rows))["all"] if len(names(rows, "class")) == 6 else None


def _share(rows: Rows) -> float | None:
    error = _error(rows)
    return None if error is None else error / errors(rows, "local")["all"]


PROMISES = [
    Promise("test error with a long range, meV", _error, most=3.0),
    Promise("with a long range / local", _share, most=0.5),
]
