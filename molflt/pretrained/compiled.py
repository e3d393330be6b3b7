"""Machine code of a model's energies, stored next to its weights."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from molflt.files import atomically, shown, write_atomically
from molflt.graph.computation import CompiledEnergies, compile_energies
from molflt.graph.regressor import EnergyRegressor

__all__ = ["load_compiled", "save_compiled"]

_PACKAGE, _RECORD = "energies.pt2", "energies.json"
_AGAIN = "export the run again, with --compiled true"


def save_compiled(model: nn.Module, weights: Path) -> list[Path]:
    """Writes energies.pt2 and energies.json next to the weights of an exported regressor."""
    files = [weights.with_name(name) for name in (_PACKAGE, _RECORD)]
    files[1].unlink(missing_ok=True)  # it describes older code
    with tempfile.TemporaryDirectory() as folder, atomically(files[0]) as part:
        made = compile_energies(_one(model), Path(folder) / _PACKAGE)
        shutil.copyfile(made, part)
    text = json.dumps(_record(weights, files[0]), indent=1)
    write_atomically(files[1], text.encode())
    return files


def load_compiled(model: nn.Module, weights: Path) -> CompiledEnergies:
    """Loads the machine code of weights; refuses code for other weights, torch or processor."""
    package, record = weights.with_name(_PACKAGE), weights.with_name(_RECORD)
    if not package.is_file() or not record.is_file():
        raise FileNotFoundError(f"{package}: no machine code, or no {_RECORD}; {_AGAIN}")
    try:
        kept = json.loads(record.read_bytes())
    except ValueError:
        kept = None
    if not isinstance(kept, dict):
        raise ValueError(f"{record}: expected a JSON object; {_AGAIN}")
    for key, own in _record(weights, package).items():
        if kept.get(key) != own:
            raise ValueError(
                f"{package}: made for {key} {shown(kept.get(key), 40)}; here is "
                f"{shown(own, 40)}; {_AGAIN}"
            )
    return CompiledEnergies(_one(model), package)


def _record(weights: Path, package: Path) -> Mapping[str, str]:
    """Returns the values that must match at load time; the weights are compiled into the code."""
    return {
        "torch": torch.__version__,
        "processor": f"{platform.system()} {platform.machine()} "
        f"{torch.backends.cpu.get_cpu_capability()}",
        "weights": _digest(weights),
        "package": _digest(package),
    }


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _one(model: nn.Module) -> EnergyRegressor:
    if type(model) is EnergyRegressor:
        return model
    raise ValueError(
        f"compiled needs a single model of energies; got {type(model).__name__}; leave compiled out"
    )
