"""A learned optimizer from its training to its use, on the command line."""

from __future__ import annotations

import csv
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import differences, error_of, last_state, logged, page_of

from molflt.commands.cli import main
from molflt.commands.train import build_parser, train
from molflt.evaluation.optimizers import final_loss, tasks_of
from molflt.optimizers import LearnedOptimizer
from molflt.optimizers.unseen import UNSEEN
from molflt.training.loop import _LightningTask

SMALL = [
    *("--recipe=learned_optimizer", "--model.dim=8", "--model.num_features=4"),
    *("--model.ffn_dim=8", "--model.position=spectral"),
    '--model.position_options={"spectrum": "gaussian_mixture", "num_nodes": 4}',
    *("--data.batch_size=2", "--data.val_problems=3", "--data.problems=12"),
    *("--task.unroll=4", "--task.burn_in=4", "--task.warmup_steps=0", "--task.lr=0.01"),
    *("--task.redraw_every=5", "--trainer.accelerator=cpu", "--trainer.ema_decay=0.9"),
    *("--trainer.max_steps=9", "--trainer.val_every=4", "--trainer.checkpoint_every=3"),
    "--trainer.log_every=2",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("optimizers") / "run"
    assert main(["train", f"--run={folder}", *SMALL]) == 0
    return folder


def test_training_is_logged_and_has_a_page(run: Path) -> None:
    assert len(logged(run, "val_mean_log_loss")) == 3
    assert all(value < 0 for value in logged(run, "val_last_log_loss"))
    assert "mean log(f / f₀)" in page_of(run)


def test_a_killed_run_is_resumed_to_the_same_bits(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, original = tmp_path / "run", _LightningTask.training_step

    def stops(self: Any, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 7:
            raise RuntimeError("power cut")
        return original(self, batch, batch_idx)

    monkeypatch.setattr(_LightningTask, "training_step", stops)
    with pytest.raises(RuntimeError, match="power cut"):
        train(**build_parser(SMALL).parse_args([f"--run={cut}", *SMALL]).as_dict())
    monkeypatch.undo()
    assert last_state(cut)["global_step"] == 6
    assert main(["train", f"--resume={cut}"]) == 0
    one, other = last_state(cut), last_state(run)
    for part in ("state_dict", "current_model_state", "optimizer_states", "lr_schedulers"):
        assert differences(one[part], other[part]) == [], part


def test_evaluation_with_adam(run: Path, tmp_path: Path) -> None:
    images = write_images(tmp_path)
    words = ["--out", str(tmp_path), "--steps", "12", "--repeats", "2", "--data", str(images)]
    words += ["--rates", "[0.01,0.1]"]
    assert main(["evaluate", str(run), *words]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results) == [*UNSEEN, "image_network", "image_convolutions"]
    rows = list(csv.DictReader((tmp_path / "curves.csv").open()))
    assert len(rows) == 5 * 2 * 2 * 12 and (tmp_path / "optimizations.png").stat().st_size > 10_000
    assert {"attention.png", "encoding.png"} <= {path.name for path in tmp_path.iterdir()}
    for task, found in results.items():
        own = [r for r in rows if r["task"] == task and float(r["step"]) == 11]
        ends = [float(r["loss"]) for r in own if r["optimizer"] == run.name]
        assert found["final_loss"] == pytest.approx(np.exp(np.mean(np.log(ends))), rel=1e-6)
        tuned = {float(r["tuned"]) for r in own if r["optimizer"] == "Adam"}
        assert {found["adam_lr"]} == tuned <= {0.01, 0.1}


def write_images(folder: Path) -> Path:
    draw = np.random.default_rng(0)
    for name, shape in (("images-idx3-ubyte", (20, 6, 6)), ("labels-idx1-ubyte", (20,))):
        header = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)
        values = draw.integers(0, 3 if len(shape) == 1 else 256, shape).astype(np.uint8)
        (folder / name).write_bytes(header + values.tobytes())
    return folder / "images-idx3-ubyte"


def test_a_run_optimizes_any_model(run: Path) -> None:
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    optimizer = LearnedOptimizer.from_run(run, net.named_parameters(), lr=2.0)
    x = torch.randn(20, 3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (net(x) - x.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_refusals(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = "recipe: language\nmodel: {}\ndata: {train: a, val: b}\ntask: {}\ntrainer: {}\n"
    (tmp_path / "config.yaml").write_text(config)
    with pytest.raises(ValueError, match="language.*learned_optimizer"):
        LearnedOptimizer.from_run(tmp_path, [])
    words = ["train", f"--run={tmp_path / 'x'}", *SMALL]
    idle = ["--model.memory=lstm", "--model.ffn_dim=null", "--model.num_features=null"]
    idle += ["--model.position=none", "--model.position_options=null"]
    assert "task.redraw_every=5" in error_of(capsys, *words, *idle)
    for names, data, word in (
        (["ackley"], None, "'ackley'"),
        (["image_network"], None, "image_network"),
        (["rosenbrock"], Path("x"), "--data x"),
    ):
        with pytest.raises(ValueError, match=word):
            tasks_of(names, data)


def test_final_losses() -> None:
    curves = np.ones((2, 20))
    curves[:, -2:] = [[1.0, 3.0], [100.0, 400.0]]
    end, spread = final_loss(curves)
    assert end == pytest.approx(np.sqrt(2 * 250)) and spread == pytest.approx(
        np.std(np.log10([2, 250]), ddof=1)
    )
    curves[0, -1] = np.inf
    assert final_loss(curves)[0] == np.inf


def test_the_package_imports_torch_on_demand() -> None:
    code = "import molflt.optimizers, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
