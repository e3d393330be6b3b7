"""Create the inputs of docs/results/certificate.md: frames and networks with random weights.

python scripts/certificate.py FOLDER   # writes FOLDER/train.extxyz and FOLDER/val_id.extxyz
PYTHONPATH=scripts python -m molflt.certify certificate:mace --elements Cu O C H
"""

from pathlib import Path

import ase.io
import numpy as np
from ase import Atoms
from ase.build import add_adsorbate, bulk, fcc111, molecule
from ase.calculators.calculator import Calculator
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from kit.words import described, guarded


def frames(count: int = 300) -> list[Atoms]:
    """Returns crystals, molecules and slabs of Cu, O, C and H, with EMT energies and forces."""
    rng, found = np.random.default_rng(0), []
    for k in range(count):
        if k % 3 == 0:
            atoms = bulk("Cu").repeat((2, 2, 1))
            strain = np.eye(3) + rng.normal(0, 0.03, (3, 3))
            atoms.set_cell(atoms.cell @ strain, scale_atoms=True)
        elif k % 3 == 1:
            atoms = molecule(["CH3OH", "H2O", "CH4", "CO2"][k // 3 % 4])
        else:
            atoms = fcc111("Cu", (2, 2, 2), vacuum=6.0)
            add_adsorbate(atoms, "OCH"[k // 3 % 3], 1.5, "fcc")
        atoms.rattle(0.08, rng=rng)
        atoms.calc = EMT()
        results = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
        if atoms.pbc.all():
            results["stress"] = atoms.get_stress()
        atoms.calc = SinglePointCalculator(atoms, **results)
        found.append(atoms)
    return found


def mace() -> Calculator:
    """Returns MACE with random weights; mace-torch 0.3.16 must be imported before e3nn."""
    import torch
    from mace.calculators import MACECalculator
    from mace.modules import ScaleShiftMACE, interaction_classes

    from e3nn.o3 import Irreps  # isort: skip

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    block = interaction_classes["RealAgnosticResidualInteractionBlock"]
    model = ScaleShiftMACE(
        r_max=5.0,
        num_bessel=8,
        num_polynomial_cutoff=5,
        max_ell=2,
        interaction_cls=block,
        interaction_cls_first=block,
        num_interactions=2,
        num_elements=4,
        hidden_irreps=Irreps("8x0e + 8x1o"),
        MLP_irreps=Irreps("8x0e"),
        gate=torch.nn.functional.silu,
        atomic_energies=torch.tensor([-1.0, -2.0, -3.0, -4.0]),
        avg_num_neighbors=10.0,
        atomic_numbers=[1, 6, 8, 29],
        correlation=2,
        atomic_inter_scale=1.0,
        atomic_inter_shift=0.0,
    )
    return MACECalculator(models=[model], device="cpu", default_dtype="float64")


def torchani() -> Calculator:
    """Returns a TorchANI 2.9 network with random weights for the elements H, C, N and O."""
    import torch
    from torchani.arch import simple_ani

    torch.manual_seed(0)
    return simple_ani(("H", "C", "N", "O"), lot="wb97x-631gd").double().ase()


@guarded
def main(words: list[str] | None = None) -> None:
    parser = described(__doc__)
    parser.add_argument("folder", type=Path)
    folder, made = parser.parse_args(words).folder, frames()
    folder.mkdir(parents=True, exist_ok=True)
    ase.io.write(folder / "train.extxyz", made[:270])
    ase.io.write(folder / "val_id.extxyz", made[270:])


if __name__ == "__main__":
    raise SystemExit(main())
