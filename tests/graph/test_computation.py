"""Energies computed from tensors alone, also by exported programs, equal energies of the model."""

import json
import shutil

import pytest
import torch
from ase import Atoms
from ase.io import write
from contract import EXACT
from graph.test_regressor import FLT, KERNEL, PERFORMER, STRUCTURES, model, structure
from tiny_run import error_of, start, write_data
from torch._inductor import config
from torch_geometric.data import Batch

import molflt
from molflt.commands.cli import main
from molflt.graph import computation
from molflt.graph.computation import EnergyComputation, EnergyInputs, export_energies

VARIANTS = {
    "default": {},
    "surface": {"subsurface": False, "descriptors": True, "radial_basis": 4},
    "messages": {"messages": 2, "message_pairs": "adsorbate", "subsurface": "near"},
    "contact": {"readout": "contact", "position_head": False, "far_field": False},
    "all": {"readout": "all"},
    "flt": FLT,
    "flt-reciprocal": {**FLT, "periodic": "reciprocal"},
    "kernel": {**KERNEL, "near_field": 0.0, "periodic": "none"},
    "performer": PERFORMER,
}


def batches(untagged: bool) -> list[Batch]:
    """Returns batches of 1 to 5 graphs, one of which has one atom; small graphs may lack tags."""
    sizes = ([1], [7, 4], [9], [3, 12, 5, 8, 2])
    return [
        Batch.from_data_list([structure(n, 10 + n, tags=n > 3 or not untagged) for n in batch])
        for batch in sizes
    ]


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_computation_from_tensors_equals_the_model(variant):
    net = model(**VARIANTS[variant]).eval()
    net.element_energies.normal_()
    compute = EnergyComputation(net)
    for batch in batches(untagged=variant == "all"):
        found = compute(*EnergyInputs.of(net, batch))
        torch.testing.assert_close(found, net(batch)["energy"], **EXACT)


@torch.no_grad()
def test_one_exported_program_for_all_sizes():
    """Includes reciprocal nodes, near pairs, a radial summary and a single atom."""
    sizes = {"layers": 1, "refinements": 1}
    net = model(**{**VARIANTS["surface"], **sizes}).eval()
    run = export_energies(net, Batch.from_data_list(STRUCTURES)).module()
    for batch in batches(untagged=False):
        found = run(*EnergyInputs.of(net, batch))
        torch.testing.assert_close(found, net(batch)["energy"], **EXACT)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("no C++ compiler")
    root = tmp_path_factory.mktemp("compiled")
    words = ["--trainer.max_steps=2", "--trainer.val_every=2"]  # positions take half of the time
    words += ["--model.position=none", "--model.position_options=null"]
    assert start(write_data(root / "data"), root / "run", *words) == 0
    words = ["export", str(root / "run"), str(root / "out"), "--about=energies"]
    with config.patch({"cpp.simdlen": 1, "aot_inductor.compile_wrapper_opt_level": "O0"}):
        assert main([*words, "--compiled=true"]) == 0  # code without SIMD, in half the time
    return root / "out"


def structures(*sizes: int) -> list[Atoms]:
    found = []
    for size in sizes:
        atoms = Atoms([29] * (size - 1) + [8], 2 * torch.rand(size, 3) * size**0.5, pbc=True)
        atoms.set_cell([8, 9, 10])
        atoms.set_tags([1] * (size - 1) + [2])
        found.append(atoms)
    return found


def test_one_package_for_all_sizes(exported, monkeypatch):
    """Includes a single atom; the model itself computes graphs that are too large for a matrix."""
    given = structures(1, 2, 3, 17, 60, 300)
    eager, fast = molflt.load(exported), molflt.load(exported, compiled=True)

    def energies(model, batch_size: int) -> list[float]:
        return [one.energy for one in model.predict(given, batch_size, force=True)]

    for batch_size in (1, 6):
        expected = pytest.approx(energies(eager, batch_size), abs=1e-5)  # float32
        assert energies(fast, batch_size) == expected
    calls = []
    program = fast.compiled.program
    fast.compiled.program = lambda *x: calls.append(x) or program(*x)
    monkeypatch.setattr(computation, "_MOST_IN_MATRIX", 20)
    assert energies(fast, 1) == expected
    assert len(calls) == (4 if fast.compiled.matrix else 6)
    with pytest.raises(ValueError, match="embedding"):
        fast.predict(given, embedding="pooled", force=True)
    with pytest.raises(ValueError, match="mesh_order"):
        fast.use_mesh_()


def test_unsupported_inputs_of_compiled_code_are_refused(exported, tmp_path, capsys):
    out = shutil.copytree(exported, tmp_path / "out")
    words = ["predict", str(out), str(tmp_path / "in.extxyz"), "--compiled=true"]
    write(tmp_path / "in.extxyz", structures(5))
    record = json.loads((out / "energies.json").read_text())
    for key in record:
        (out / "energies.json").write_text(json.dumps({**record, key: "other"}))
        assert f"for {key} 'other'" in error_of(capsys, *words)
    (out / "energies.json").unlink()
    assert "--compiled true" in error_of(capsys, *words)
    assert "the CPU; got device='cuda'" in error_of(capsys, *words, "--device=cuda")


def test_a_missing_compiler_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "missing-compiler"))
    with pytest.raises(ValueError, match=r"C\+\+ compiler.*CXX"):
        computation.compile_energies(model(), tmp_path / "x.pt2")
