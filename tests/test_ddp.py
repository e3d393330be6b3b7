"""Two processes on the CPU give the same metrics, steps and resumed runs as one process."""

import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from tiny_run import (
    arguments,
    assert_same_state,
    last_state,
    logged,
    process,
    python,
    start,
    table,
    write_data,
)

from molflt.graph import EnergyRegressor
from molflt.training.callbacks import _LastCheckpoint
from molflt.training.loop import _LightningTask
from molflt.training.run_folder import RunFolder

if not torch.distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

# a tiny learning rate: both runs validate the initial weights
STILL = [
    "--task.lr=1e-30",
    "--trainer.max_steps=7",
    "--trainer.val_every=4",
    "--trainer.log_every=7",
    "--trainer.num_sanity=0",
]


def finish(*words):
    running = process(*words)
    _, errors = running.communicate(timeout=3000)
    assert running.returncode == 0, errors


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    data = write_data(folder / "data", train=24, val=21)  # the last of 6 val batches has one system
    start(data, folder / "one", *STILL, "--data.batch_size=4")
    words = ["--trainer.devices=2", "--trainer.strategy=ddp"]
    finish(*arguments(data, folder / "two", *STILL, *words))
    return folder / "one", folder / "two"


def test_validation_counts_each_system_once(both):
    for run in both:
        assert [row["step"] for row in table(run / "metrics.csv", "val_mae_eV")] == ["4", "7"]
    for key in ("val_mae_eV", "val_ewt_percent", "val_mse_eV2"):
        one, two = (logged(run, key) for run in both)
        assert two == pytest.approx(one, rel=1e-9)


def test_two_processes_train_on_twice_as_many_systems(both):
    """Seven steps of two batches have the same mean error as 14 steps of one batch."""
    one, two = both
    assert last_state(two)["global_step"] == 7
    weights = {name: last_state(run)["state_dict"] for name, run in (("one", one), ("two", two))}
    for name, tensor in weights["one"].items():
        assert torch.allclose(tensor, weights["two"][name], rtol=0, atol=1e-12), name
    long = one.parent / "long"
    words = ["--trainer.max_steps=14", "--trainer.log_every=14"]
    start(one.parent / "data", long, *STILL, *words)
    key = "train_mae_eV"
    assert logged(two, key)[-1] == pytest.approx(logged(long, key)[-1], rel=1e-9)


def test_two_processes_with_two_batches_each_take_the_step_of_four(both):
    """Some parameters are frozen; processes do not exchange them."""
    folder = both[0].parent
    words = ["--task.lr=1e-2", "--trainer.precision=64-true", "--trainer.max_steps=3"]
    words += ["--trainer.num_sanity=0", "--task.freeze=[embedding.*]"]
    start(folder / "data", folder / "four", *words, "--trainer.accumulate=4")
    words += ["--trainer.accumulate=2", "--trainer.devices=2", "--trainer.strategy=ddp"]
    finish(*arguments(folder / "data", folder / "pairs", *words))
    one, two = (last_state(folder / name)["state_dict"] for name in ("four", "pairs"))
    for name, tensor in one.items():
        assert torch.allclose(tensor, two[name], rtol=0, atol=1e-6), name
    still = last_state(both[0])["state_dict"]
    assert (
        max(float((one[name].double() - still[name].double()).abs().max()) for name in one) > 1e-3
    )


def test_torchrun_resumes_a_run_started_by_lightning(both):
    run = shutil.copytree(both[1], both[1].parent / "resumed")
    train = ["-m", "--", "molflt", "train", "--resume", str(run), "--trainer.max_steps=8"]
    words = ["-m", "torch.distributed.run", "--nproc-per-node=2", *train]
    python(*words)
    assert last_state(run)["global_step"] == 8 and not (run / ".lock").exists()


def test_a_signal_during_communication_is_not_lost(tmp_path):
    callback = _LastCheckpoint(RunFolder(tmp_path), every=10)

    class Strategy:
        root_device = torch.device("cpu")

        def reduce(self, flag, reduce_op):
            agreed = flag.clone()
            callback._note(signal.SIGTERM, None)  # too late for this step
            return agreed

    trainer = SimpleNamespace(world_size=2, strategy=Strategy())
    assert callback._agreed_signal(trainer) == 0
    assert callback.signum == signal.SIGTERM


KILLED = """
import os, signal, sys
from molflt.commands.cli import main
from molflt.training.loop import _LightningTask

original = _LightningTask.training_step

def killed(self, batch, place):
    if self.global_step == 5 and os.environ.get("LOCAL_RANK") == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, batch, place)

_LightningTask.training_step = killed
sys.exit(main(sys.argv[1:]))
"""


def test_a_killed_rank_ends_the_others_and_resuming_is_exact(tmp_path):
    data = write_data(tmp_path / "data", train=24, val=21)
    words = ["--trainer.devices=2", "--trainer.max_steps=6", "--trainer.checkpoint_every=3"]
    words += ["--task.lr=1e-2", "--trainer.num_sanity=0"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    (tmp_path / "train.py").write_text(KILLED)
    command = [tmp_path / "train.py", "train", *arguments(data, killed, *words)]
    done = python(*command, cwd=tmp_path, status=2)
    errors = [line for line in done.stderr.splitlines() if line.startswith("molflt: error: ")]
    assert len(errors) == 1 and f"--resume {killed}" in errors[0]
    assert last_state(killed)["global_step"] == 3 and not list(tmp_path.glob("*.log"))
    for arguments_of in (["--resume", str(killed)], arguments(data, whole, *words)):
        finish(*arguments_of)
    assert_same_state(killed, whole)


def test_ranks_share_trained_elements():
    model = EnergyRegressor(dim=8, heads=1, layers=1)
    steps = _LightningTask(SimpleNamespace(model=model, lr=1.0), None)
    model.trained_elements[29] = True

    def reduce(seen, reduce_op):
        others = torch.zeros_like(seen)
        others[78] = 1
        return seen + others

    steps._trainer = SimpleNamespace(world_size=2, strategy=SimpleNamespace(reduce=reduce))
    steps._share_seen()
    assert model.trained_elements.nonzero().flatten().tolist() == [29, 78]
