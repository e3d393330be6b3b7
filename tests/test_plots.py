"""Pictures are drawn from odd input too; what stands in them is checked through their figures."""

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from molflt import plots
from molflt.attention import GaussianBasis, GaussianNodes, SpectralPosition
from molflt.plots import GroupError

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def figures(monkeypatch) -> list:
    """Every figure that is drawn, for looking into after it was written."""
    drawn: list = []
    original = plots._figure

    @contextmanager
    def remember(png, **options):
        with original(png, **options) as figure:
            drawn.append(figure)
            yield figure

    monkeypatch.setattr(plots, "_figure", remember)
    return drawn


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(PNG) and path.stat().st_size > 5000


def texts(figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_training_curve(tmp_path: Path, figures) -> None:
    rows = ["step,lr,train_loss,train_mae_eV,val_mae_eV,val_ewt_percent"]
    rows += [f"{s},{1e-3 - 1e-6 * s},{50 / s},{10 / s}," for s in range(10, 110, 10)]
    rows.insert(6, "50,,,,0.31,2.5")
    rows.append("100,,,,0.42,1.5")
    (tmp_path / "metrics.csv").write_text("\n".join(rows) + "\n")
    plots.training_curve(tmp_path / "metrics.csv", tmp_path / "deep" / "curve.png")
    assert is_picture(tmp_path / "deep" / "curve.png")
    loss, mae, ewt, lr = figures[0].axes
    assert [a.get_ylabel() for a in (loss, mae, ewt, lr)] == [
        "loss",
        "MAE / eV",
        "EwT / %",
        "learning rate",
    ]
    assert lr.get_xlabel() == "step"
    labels = [text.get_text() for text in mae.get_legend().get_texts()]
    assert labels == ["training", "validation", "best: 0.310 eV at step 50"]
    validation = mae.lines[1]
    np.testing.assert_allclose(validation.get_xdata(), [50, 100])
    np.testing.assert_allclose(validation.get_ydata(), [0.31, 0.42])


def test_training_curve_draws_what_there_is(tmp_path: Path, figures) -> None:
    """A run stopped early has one row; a row of units below the header is no number."""
    (tmp_path / "metrics.csv").write_text("step,train_loss,lr\n,,1\n10,0.0,0.001\n")
    plots.training_curve(tmp_path / "metrics.csv", tmp_path / "curve.png")
    assert [axes.get_ylabel() for axes in figures[0].axes] == ["loss", "learning rate"]


def test_training_curve_refuses_other_files(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("epoch,loss\n1,2\n")
    with pytest.raises(ValueError, match="expected a column step; got epoch, loss"):
        plots.training_curve(tmp_path / "other.csv", tmp_path / "curve.png")
    (tmp_path / "empty.csv").write_text("step,lr,train_loss\n")
    with pytest.raises(ValueError, match="nothing to draw"):
        plots.training_curve(tmp_path / "empty.csv", tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()


def test_parity(tmp_path: Path, figures) -> None:
    target = np.linspace(-4.0, 1.0, 500)
    energy = target + 0.25
    energy[0] = 500.0  # one wild prediction must not squeeze the others into a line
    plots.parity({"val_id": (target, energy), "val_ood_ads": (target, target)}, tmp_path / "p.png")
    assert is_picture(tmp_path / "p.png")
    first, second = figures[0].axes
    mae = (499 * 0.25 + 504.0) / 500
    assert first.get_title() == f"val_id: MAE {mae:.3f} eV (n = 500)"
    assert second.get_title() == "val_ood_ads: MAE 0.000 eV (n = 500)"
    assert first.get_xlim() == first.get_ylim() == second.get_xlim()
    assert first.get_xlim()[0] > -5 and first.get_xlim()[1] < 2
    assert texts(figures[0]) == ["1 outside"]


def test_parity_of_many_is_a_density_with_one_scale(tmp_path: Path, figures) -> None:
    draw = np.random.default_rng(0)
    pairs = {}
    for split, count in (("val_id", 3000), ("val_ood_ads", 9000), ("val_ood_cat", 40)):
        target = draw.normal(-1.5, 2.0, count)
        pairs[split] = (target, target + draw.normal(0, 0.3, count))
    plots.parity(pairs, tmp_path / "p.png")
    assert is_picture(tmp_path / "p.png")
    one, two, three, hidden, _ = figures[0].axes  # and one color bar
    assert not hidden.get_visible()
    assert one.collections[0].get_clim() == two.collections[0].get_clim()
    assert len(three.collections[0].get_offsets()) == 40


def test_parity_refuses_nothing_and_unequal() -> None:
    with pytest.raises(ValueError, match="at least one split"):
        plots.parity({}, Path("never.png"))
    with pytest.raises(ValueError, match=r"'val_id' needs one prediction per label; got \(3,\)"):
        plots.parity({"val_id": (np.zeros(4), np.zeros(3))}, Path("never.png"))


def test_errors(tmp_path: Path, figures) -> None:
    groups = [GroupError(f"C{i}H", i, 0.1 * i) for i in range(1, 31)] + [GroupError("N2", 5, 9.0)]
    sizes = [GroupError("7-20", 40, 0.3), GroupError("21-50", 60, 0.2)]
    absolute = {"val_id": np.array([0.01, 0.5, 0.03, 0.001])}
    plots.errors(groups, sizes, absolute, tmp_path / "e.png")
    assert is_picture(tmp_path / "e.png")
    left, middle, right = figures[0].axes
    assert left.get_title().endswith("the 20 worst of 31")
    names = [label.get_text() for label in left.get_yticklabels()]
    assert len(names) == 20 and names[-1] == "N$_{2}$" and names[-2] == "C$_{30}$H"
    assert [label.get_text() for label in middle.get_yticklabels()] == ["21-50", "7-20"]
    steps = right.lines[0]
    share = steps.get_ydata()[np.searchsorted(steps.get_xdata(), 0.02) - 1]
    assert share == 50.0  # two of four errors are below 0.02 eV
    assert right.lines[1].get_xdata()[0] == 0.02


def test_errors_of_exact_predictions(tmp_path: Path) -> None:
    plots.errors(
        [GroupError("O", 1, 0.0)],
        [GroupError("9", 1, 0.0)],
        {"val_id": np.zeros(1)},
        tmp_path / "e.png",
    )
    assert is_picture(tmp_path / "e.png")


def test_errors_refuses_nothing() -> None:
    with pytest.raises(ValueError, match="got none"):
        plots.errors([], [], {}, Path("never.png"))


@pytest.mark.parametrize("heads", [1, 6, 17])
def test_rpe_profiles(tmp_path: Path, figures, heads: int) -> None:
    position = SpectralPosition(GaussianBasis(heads, 8), GaussianNodes(heads, 4))
    model = nn.Module()
    model.stack = nn.Module()
    model.stack.position = position
    plots.rpe_profiles(model, tmp_path / "f.png", r_max=6.0)
    assert is_picture(tmp_path / "f.png")
    shown = [axes for axes in figures[0].axes if axes.get_visible()]
    assert len(shown) == heads
    curve = shown[-1].lines[1]
    r = torch.as_tensor(curve.get_xdata(), dtype=torch.float32)
    assert r.max() == 6.0
    torch.testing.assert_close(
        torch.as_tensor(curve.get_ydata()).float(), position.radial_profile(r)[-1].detach()
    )


def test_rpe_profiles_refuses_a_model_without() -> None:
    model = SimpleNamespace(stack=SimpleNamespace(position=None))
    with pytest.raises(ValueError, match="no relative encoding"):
        plots.rpe_profiles(model, Path("never.png"))
