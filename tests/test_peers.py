import copy
import importlib
import itertools
import json
import tarfile
from collections import defaultdict
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from script_files import load_script
from tiny_run import SMALL, structures, write_data, write_splits
from torch import nn
from torch_geometric.data import Batch, Data

from molflt.data.structures import open_dataset
from molflt.data.structures.records import make_record
from molflt.data.structures.sources import VAL_SPLITS

peers = load_script("peers")
jobs, models, nets, pool, report, ridge = (
    importlib.import_module(f"peers_kit.{name}")
    for name in ("jobs", "models", "nets", "pool", "report", "ridge")
)

SMALLER = {
    "schnet": {"hidden_channels": 8, "num_filters": 8, "num_interactions": 2, "num_gaussians": 9},
    "dimenet++": {
        "hidden_channels": 8,
        "num_blocks": 2,
        "int_emb_size": 4,
        "out_emb_channels": 8,
        "num_spherical": 3,
        "num_radial": 2,
    },
    "visnet": {"hidden_channels": 16, "num_layers": 2},
    "painn": {"features": 8, "layers": 2},
}
CELL = np.array([[3.6, 0.0, 0.0], [1.1, 4.1, 0.0], [0.4, -0.3, 4.9]])


@cache
def _made(name: str) -> nn.Module:
    return models.NETS[name].make(**SMALLER[name]).double().eval()


def peer(name: str) -> nn.Module:
    """Returns a peer with random weights, because some weights are initially 0."""
    made = copy.deepcopy(_made(name))  # deriving DimeNet's basis takes seconds
    torch.manual_seed(0)  # here, because building a net uses random numbers
    with torch.no_grad():
        for weight in made.parameters():
            if not weight.any():
                weight.normal_(std=0.3)
    return made


def crystal(seed: int = 0, atoms: int = 4) -> dict[str, np.ndarray]:
    """Returns a crystal much smaller than the cutoff, in which most neighbors are images."""
    draw = np.random.default_rng(seed)
    corners = np.array([[0, 0, 0], [0.5, 0.5, 0.1], [0.1, 0.5, 0.6], [0.6, 0.1, 0.5]])[:atoms]
    pos = (corners + draw.uniform(-0.05, 0.05, corners.shape)) @ CELL
    return {
        "pos": pos,
        "cell": CELL,
        "atomic_numbers": np.array([29, 78, 8, 1])[:atoms],
        "tags": np.array([0, 1, 2, 2])[:atoms],
    }


def data_of(parts: dict[str, np.ndarray]) -> Data:
    """Returns PyG data in double precision; records are rounded to single precision."""
    made = make_record(**{**parts, "sid": 0})
    made.pos = torch.from_numpy(np.asarray(parts["pos"], dtype=np.float64))
    made.cell = torch.from_numpy(np.asarray(parts["cell"], dtype=np.float64))[None]
    return made


def energies(model: nn.Module, *every: dict[str, np.ndarray]) -> torch.Tensor:
    with torch.no_grad():
        return model(Batch.from_data_list([data_of(parts) for parts in every]))["energy"]


def same_crystals(own: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Returns a crystal in other orientations, images, places and orders of atoms."""
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(3, 3)))[0]
    turn[:, 0] *= -np.linalg.det(turn)  # includes a reflection
    order = np.array([2, 0, 3, 1])
    steps = np.array([[1, 0, 0], [0, -2, 0], [1, 1, 1], [0, 0, 0]])
    return [
        {**own, "pos": own["pos"] @ turn, "cell": CELL @ turn},
        {**own, "pos": own["pos"] + steps @ CELL},
        {**own, "pos": own["pos"] + 0.37},
        {key: value if key == "cell" else value[order] for key, value in own.items()},
    ]


@pytest.mark.parametrize("name", models.NETS)
def test_symmetries_of_crystals_keep_energies(name: str) -> None:
    own = crystal()
    found = energies(peer(name), own, *same_crystals(own))
    torch.testing.assert_close(found, found[:1].expand(5), rtol=1e-9, atol=1e-9)
    moved = own["pos"] + np.eye(4)[:, :1] * 0.1
    others = energies(peer(name), {**own, "pos": moved}, {**own, "tags": np.array([2, 1, 0, 0])})
    assert (others - found[0]).abs().min() > 1e-4
    untrained = copy.deepcopy(_made(name))
    untrained.energy_mean.fill_(-1.5)
    assert energies(untrained, own).tolist() == [pytest.approx(-1.5)]


@pytest.mark.parametrize("name", models.NETS)
@pytest.mark.parametrize("atoms", [1, 4])
def test_twice_the_cell_has_twice_the_energy(name: str, atoms: int) -> None:
    """Periodic images count as neighbors, including images of the atom itself."""
    own = crystal(atoms=atoms)
    twice = {key: np.concatenate([value, value]) for key, value in own.items() if key != "cell"}
    twice["pos"][atoms:] += CELL[1]
    twice["cell"] = CELL * np.array([[1], [2], [1]])
    one, two = energies(peer(name), own, twice).tolist()
    assert two == pytest.approx(2 * one, rel=1e-9)


@pytest.mark.parametrize("name", models.NETS)
def test_atoms_below_the_surface_are_left_out_where_ours_leaves_them_out(name: str) -> None:
    net, own = peer(name), crystal()
    net.subsurface = False
    part = {key: value if key == "cell" else value[1:] for key, value in own.items()}
    torch.testing.assert_close(energies(net, own), energies(peer(name), part), rtol=0, atol=1e-9)
    untagged = {**own, "tags": 0 * own["tags"]}
    found = energies(net, untagged)
    torch.testing.assert_close(found, energies(peer(name), untagged), rtol=0, atol=1e-9)


def test_shares_of_the_training_set_depend_only_on_the_seed(tmp_path: Path) -> None:
    whole = open_dataset(write_data(tmp_path) / "train.safetensors")
    sids = [{int(data.sid) for data in jobs.part_of(whole, share, 3)} for share in (0.2, 0.5, 1)]
    assert [len(part) for part in sids] == [4, 11, 22]
    assert sids[0] < sids[1] < sids[2]
    part = jobs.part_of(whole, 0.5, 3)
    assert part.natoms.tolist() == [data.natoms for data in part]
    assert part.y_relaxed.tolist() == pytest.approx([float(data.y_relaxed) for data in part])
    assert {int(data.sid) for data in jobs.part_of(whole, 0.5, 4)} != sids[1]


@pytest.mark.parametrize(("config", "references"), [("demo", "fit"), ("demo-all", None)])
def test_peers_subtract_reference_energies_where_ours_does(config: str, references: str) -> None:
    words = ["--config", str(models.REPOSITORY / f"configs/{config}.yaml")]
    assert jobs.config_of("painn", words)["task"]["references"] == references
    words.append("--task.references=none")
    assert jobs.config_of("painn", words)["task"]["references"] == "none"
    with pytest.raises(ValueError, match=r"model\.subsurface.*near"):
        jobs.config_of("painn", [*words, "--model.subsurface=near"])


def test_a_comparison_is_written(tmp_path, monkeypatch, capsys) -> None:
    """Jobs run in this process, for 0.12 seconds each."""
    (tmp_path / "small.yaml").write_text("model:\n  position_head: false\n  radial_basis: 4\n")
    done: list[str] = []

    def work(path: Path, job: dict) -> None:
        done.append(path.stem)
        path.parent.mkdir(parents=True, exist_ok=True)
        jobs.run_job(json.loads(json.dumps(job)), path)

    monkeypatch.setattr(pool, "_work", work)
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    words = ["--data", str(write_data(data)), "--out", str(out), "--minutes", "0.002"]
    words += ["--evaluations", "2", "--models", "median", str(tmp_path / "small.yaml")]
    words += ["--seeds", "1", "--fractions", "1", "0.5", "--"]
    assert peers.main([*words, *(word for word in SMALL if "trainer" not in word)]) == 0
    assert len(done) == 4
    text = capsys.readouterr().out
    assert text.strip() == (out / "comparison.md").read_text().strip()
    assert text.count("| median | 1 | – | – | – |") == 2
    assert text.count("| small | 1 |") == 2 and "50% of the training set" in text
    assert all((out / f"error-{name}.png").stat().st_size > 1000 for name in ("cpu", "size"))
    result = json.loads((out / "jobs" / "small_0.002min_1_seed0.json").read_text())
    used, longest = result["cpu_seconds"], result["longest_step_seconds"]
    assert used - longest < 0.12 <= used and result["steps"] >= 1
    own = result["splits"]["val_id"]
    labels = open_dataset(tmp_path / "data" / "val_id.safetensors")
    assert own["sid"] == [int(data.sid) for data in labels]
    error = np.abs(np.array(own["energy_eV"]) - labels.y_relaxed)
    assert own["mae_eV"] == pytest.approx(error.mean()) == result["curve"][-1]["mae_eV"]
    assert own["ewt_percent"] == pytest.approx(100 * (error < 0.02).mean())


@pytest.mark.parametrize("groupings", [0, 1, 2])
def test_the_standard_error_matches_repeated_draws(groupings: int) -> None:
    """Numbers (40 x 30, 400 draws) share normal terms by row, by column, by both or not at all."""
    draw, shape = np.random.default_rng(0), (40, 30)
    places = [np.repeat(np.arange(40), 30), np.tile(np.arange(30), 40)][:groupings]
    means, found = [], []
    for _ in range(400):
        values = draw.normal(size=shape)
        values += draw.normal(size=(40, 1)) if groupings > 0 else 0.0
        values += draw.normal(size=(1, 30)) if groupings > 1 else 0.0
        means.append(values.mean())
        found.append(report.variance_of_mean(values.ravel(), places))
    assert np.mean(found) == pytest.approx(np.var(means), rel=0.2)
    values = draw.normal(size=7)
    assert report.variance_of_mean(values, []) == pytest.approx(values.var(ddof=1) / 7)
    assert np.isnan(report.variance_of_mean(values, [np.zeros(7, int)]))


RESULTS = models.REPOSITORY / "docs" / "results"


@pytest.fixture(scope="module")
def archived() -> dict:
    """Returns errors of all jobs: (folder, minutes), model, (split, share), seed -> eV."""
    found = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    with tarfile.open(RESULTS / "peers-runs.tar.xz") as archive:
        for file in filter(tarfile.TarInfo.isfile, archive):
            result = json.load(archive.extractfile(file))
            job = result["job"]
            errors = found[file.name.split("/")[1], job["minutes"]][job["model"]]
            for split, own in result["splits"].items():
                errors[split, job["fraction"]][job["seed"]] = own["mae_eV"]
    return found


PAGES = [  # page, folder, minutes, shares of the training set, splits, seeds
    ("dft.md", "game-net", 10, (1,), VAL_SPLITS, 3),
    ("sample.md", "sample", 10, (1,), VAL_SPLITS, 3),
    ("dft.md", "attention", 10, (1,), VAL_SPLITS, 3),
    ("dft.md", "parts", 10, (1,), VAL_SPLITS, 3),
    ("dft.md", "game-net-40", 40, (1,), VAL_SPLITS, 1),
    ("sample.md", "sample-40", 40, (1,), VAL_SPLITS, 1),
    ("dft.md", "game-net", 10, (0.1, 0.3, 1), VAL_SPLITS[:3], 1),
    ("sample.md", "sample", 10, (0.1, 0.3, 1), VAL_SPLITS, 1),
]


@pytest.mark.parametrize(("page", "folder", "minutes", "shares", "splits", "seeds"), PAGES)
def test_the_page_matches_the_archived_runs(
    page, folder, minutes, shares, splits, seeds, archived
) -> None:
    """Computes the cells of the tables; cells of "parts" contain the errors of all seeds."""
    text, of_models = (RESULTS / page).read_text().replace("*", ""), archived[folder, minutes]
    assert len(of_models) >= 5
    for model, errors in of_models.items():
        cells = []
        for key in itertools.product(splits, shares):
            own = [error for _, error in sorted(errors[key].items())][:seeds]
            same = max(own) - min(own) < 5e-4  # models that do not depend on the seed
            each = ", ".join(f"{error:.3f}" for error in own)
            of_seeds = report.mean_sd(own[:1] if same else own, 3)
            cells.append(each if folder == "parts" else of_seeds)
        assert f"| {' | '.join(cells)} |" in text, model


def test_kernel_ridge_learns_by_cross_validation(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="kernel ridge needs the extra bench")

    def with_energies(count: int, seed: int):
        for record in structures(count, seed=seed):
            mine = record.atomic_numbers[record.tags == 2]
            record.y_relaxed[:] = -0.3 * (mine == 8).sum() - 0.1 * (mine == 78).sum()
            yield record

    write_splits(tmp_path, train=with_energies(60, 0), val_id=with_energies(30, 1))
    train, val = (open_dataset(tmp_path / f"{name}.safetensors") for name in ("train", "val_id"))
    model = ridge.KernelRidge(seed=0)
    model.fit(train)
    error = np.abs(model.predict(val) - val.y_relaxed).mean()
    assert error < 0.3 * np.abs(np.median(train.y_relaxed) - val.y_relaxed).mean()
    assert set(model.chosen) == {"kernel", "alpha", "gamma", "tried"}
