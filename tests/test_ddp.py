"""Two processes on the CPU give the same metrics, steps and resumed runs as one process."""

import contextlib
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.strategies.launchers import subprocess_script
from tiny_run import (
    arguments,
    assert_same_state,
    at_step,
    forked,
    last_state,
    logged,
    start,
    table,
    write_data,
)

from molflt.graph import EnergyRegressor
from molflt.training.fit import _LastCheckpoint
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


def pair(*words):
    """Runs a command in two processes that have the environment of torchrun."""
    environment = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": 2}
    environment["MASTER_PORT"] = find_free_network_port()
    ranks = [forked("train", *words, **environment, RANK=i, LOCAL_RANK=i) for i in range(2)]
    for rank in ranks:
        rank.join(600)
    return [rank.exitcode for rank in ranks]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    data = write_data(folder / "data", train=24, val=21)  # the last of 6 val batches has one system
    start(data, folder / "one", *STILL, "--data.batch_size=4")
    words = ["--trainer.devices=2", "--trainer.strategy=ddp"]
    assert pair(*arguments(data, folder / "two", *STILL, *words)) == [0, 0]
    return folder / "one", folder / "two"


def test_two_processes_train_on_twice_as_many_systems_and_validate_each_once(both):
    """Seven steps of two batches have the same mean error as 14 steps of one batch."""
    for run in both:
        assert [row["step"] for row in table(run / "metrics.csv", "val_mae_eV")] == ["4", "7"]
    for key in ("val_mae_eV", "val_ewt_percent", "val_mse_eV2"):
        one, two = (logged(run, key) for run in both)
        assert two == pytest.approx(one, rel=1e-9)
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


def test_a_signal_during_communication_is_not_lost(tmp_path):
    callback = _LastCheckpoint(RunFolder(tmp_path), every=10, val_every=10)

    class Strategy:
        root_device = torch.device("cpu")

        def reduce(self, flag, reduce_op):
            agreed = flag.clone()
            callback._note(signal.SIGTERM, None)  # too late for this step
            return agreed

    trainer = SimpleNamespace(world_size=2, strategy=Strategy())
    assert callback._agreed_signal(trainer) == 0
    assert callback.signum == signal.SIGTERM


def test_a_slow_rank_joins_the_first_checkpoint(tmp_path):
    folder = RunFolder(tmp_path)
    folder.last.parent.mkdir()
    folder.last.touch()  # by the first rank, which waits for the others
    saved = []
    trainer = SimpleNamespace(global_step=1, max_steps=2, save_checkpoint=saved.append)
    _LastCheckpoint(folder, every=10, val_every=10)._save_early(trainer)
    assert saved == [folder.last]


def test_another_process_waits_for_the_files_of_the_first(tmp_path, monkeypatch):
    """The tokenizer of an interrupted start is not used."""
    first, second = (RunFolder(tmp_path) for _ in range(2))
    second.writes = False
    for name in ("versions.json", "tokenizer.json", "config.yaml"):
        (tmp_path / name).write_text("{}")
    first.provenance["config"] = {"seed": 1}
    files = {"tokenizer.json": b"learned"}
    with first.held(False), second.held(False), monkeypatch.context() as patched:
        patched.setattr("time.sleep", lambda _: first.write(files))
        second.await_files()
    assert (tmp_path / "tokenizer.json").read_bytes() == b"learned"


def kill_one(_):
    if os.environ["LOCAL_RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_ends_the_others_and_both_resume_exactly(both, tmp_path, capfd):
    """Two processes with two batches each also take the steps of one process with four batches.

    Some parameters are frozen; processes do not exchange them.
    """
    data, killed, whole, four = (
        both[0].parent / "data",
        *(tmp_path / name for name in ("killed", "whole", "four")),
    )
    words = ["--task.lr=1e-2", "--trainer.precision=64-true", "--trainer.max_steps=6"]
    words += ["--trainer.num_sanity=0", "--task.freeze=[embedding.*]"]
    words += ["--trainer.checkpoint_every=3"]
    two = [*words, "--trainer.accumulate=2", "--trainer.devices=2"]
    with at_step(5, kill_one):
        assert pair(*arguments(data, killed, *two)) == [2, -signal.SIGKILL]
    errors = [x for x in capfd.readouterr().err.splitlines() if x.startswith("molflt: error: ")]
    assert len(errors) == 1 and f"--resume {killed}" in errors[0]
    assert last_state(killed)["global_step"] == 3
    assert pair("--resume", killed) == [0, 0]
    assert not (killed / ".lock").exists()
    assert pair(*arguments(data, whole, *two)) == [0, 0]
    assert_same_state(killed, whole)
    start(data, four, *words, "--trainer.accumulate=4")
    expected, start_of = (last_state(run)["state_dict"] for run in (four, both[0]))
    for name, tensor in last_state(whole)["state_dict"].items():
        assert torch.allclose(expected[name], tensor, rtol=0, atol=1e-6), name
    moved = [(expected[name].double() - start_of[name].double()).abs().max() for name in start_of]
    assert max(moved) > 1e-3


def test_a_signal_stops_all_processes_with_a_curve_and_a_hint(
    shared_data, tmp_path, monkeypatch, capfd
):
    """Lightning kills a process if those that it started have ended with an error."""
    run, draw = tmp_path / "run", RunFolder.draw_curve

    def draw_after_the_others(self, metrics):
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        draw(self, metrics)

    words = ["--trainer.devices=2", "--trainer.max_steps=9", "--trainer.log_every=1"]
    words = ["train", *arguments(shared_data, run, *words)]

    def fork(command, env, cwd):  # instead of a new Python, which imports everything again
        second = forked(*words, **env)
        second.poll = lambda: setattr(second, "returncode", second.exitcode)
        second.send_signal = lambda _: second.kill()
        return second

    def stop_the_first(_):
        if os.environ["LOCAL_RANK"] == "0":
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(RunFolder, "draw_curve", draw_after_the_others)
    monkeypatch.setattr(subprocess_script, "subprocess", SimpleNamespace(Popen=fork))
    monkeypatch.setattr(_ChildProcessObserver.__init__, "__defaults__", (0.01,))  # s; polling
    with at_step(5, stop_the_first):
        first = forked(*words)
    first.join(600)
    assert first.exitcode == 128 + signal.SIGTERM
    hint = f"at step 6; to continue: molflt train --resume {run}"
    assert hint in capfd.readouterr().err
    assert (run / "curve.png").is_file() and not (run / ".lock").exists()


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
