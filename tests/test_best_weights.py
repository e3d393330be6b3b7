import math
from types import SimpleNamespace

import pytest
import torch

from molflt.tasks.images import ImageTask
from molflt.tasks.is2re import IS2RETask
from molflt.tasks.language import LanguageTask
from molflt.tasks.potential import PotentialTask, _Errors
from molflt.tasks.sentences import SentenceTask
from molflt.training.fit import _BestWeights

NAN = math.nan
FORCE, ENERGY = "force_mae_meV_per_A", "energy_mae_meV_per_atom"


def chosen(task, validations, was=None, patience=None, weights=(1, 1, 1), diverged=()):
    """Returns the steps of saved weights, the last header, and the state of early stopping.

    At the steps `diverged`, the sums of the validation are not finite.
    """
    kept, folder = [], SimpleNamespace(provenance={})
    folder.save_weights = lambda name, weights, header: kept.append(header)
    folder.last = SimpleNamespace(with_name=lambda name: SimpleNamespace(is_file=lambda: True))
    task = object.__new__(task)
    task.weights = weights
    best = _BestWeights(task, folder, patience)
    if was is not None:
        best.load_state_dict(was)
    for step, found in enumerate(validations, start=1):
        trainer = SimpleNamespace(sanity_checking=False, global_step=step, max_steps=99)
        finite = step not in diverged
        module = SimpleNamespace(validation_is_finite=finite, model=torch.nn.Identity())
        module.validation_metrics = lambda found=found: found
        best.on_validation_epoch_end(trainer, module)
        again = _BestWeights(task, folder, patience)
        again.load_state_dict(best.state_dict())
        best = again  # as in a resumed run
    return [header["step"] for header in kept], kept[-1], folder.provenance.get("stopped")


def rows(**columns):
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


@pytest.mark.parametrize(
    ("task", "validations", "steps", "metric"),
    [
        (SentenceTask, rows(score_percent=[0, 0, 0], mean_loss=[3, 2, 4]), [1, 2], "score_percent"),
        (SentenceTask, rows(score_percent=[NAN] * 3, mean_loss=[3, 4, 2]), [1, 3], "mean_loss"),
        (SentenceTask, rows(score_percent=[NAN, 9, NAN], mean_loss=[3, 4, 2]), [1, 2], None),
        (ImageTask, rows(top1_percent=[9, 9, 8], cross_entropy=[3, 2, 1]), [1, 2], None),
        (LanguageTask, rows(perplexity=[math.inf] * 2, bits_per_token=[9, 8]), [1, 2], None),
        (LanguageTask, rows(perplexity=[5, 5, 5, 6]), [1, 2, 3], "perplexity"),
        (IS2RETask, rows(mae_eV=[2, 1, 1], ewt_percent=[0, 9, 9]), [1, 2, 3], "mae_eV"),
    ],
)
def test_ties_are_broken_by_other_metrics_and_keep_the_later(task, validations, steps, metric):
    kept, header, _ = chosen(task, validations)
    assert kept == steps
    assert metric is None or f"val_{metric}" in header


@pytest.mark.parametrize(
    ("force", "labels", "weights", "metric"),
    [
        ([0, 0, 0], 0, (1, 1, 1), ENERGY),
        ([1e-9, 2e-9, 3e-9], 1e-3, (1, 1, 1), ENERGY),
        ([NAN] * 3, NAN, (1, 1, 1), ENERGY),
        ([30, 40, 50], 90, (1, 0, 1), ENERGY),
        ([30, 20, 25], 90, (1, 1, 1), FORCE),
    ],
)
def test_energies_select_a_potential_without_useful_forces(force, labels, weights, metric):
    found = rows(**{FORCE: force, ENERGY: [9, 3, 2], "force_labels_meV_per_A": [labels] * 3})
    kept, header, _ = chosen(PotentialTask, found, weights=weights)
    assert f"val_{metric}" in header
    assert kept[-1] == (2 if metric == FORCE else 3)


def test_untrained_energies_do_not_select_a_potential():
    stress = "stress_mae_meV_per_A3"
    found = rows(
        **{FORCE: [0, 0], ENERGY: [3, 9], stress: [5, 4], "force_labels_meV_per_A": [0, 0]}
    )
    kept, header, _ = chosen(PotentialTask, found, weights=(0, 1, 1))
    assert kept == [1, 2] and f"val_{stress}" in header


def test_state_of_an_earlier_version():
    """The state has one metric, which may be 0 and cannot be improved."""
    found = rows(**{FORCE: [0, 0], ENERGY: [9, 3], "force_labels_meV_per_A": [0, 0]})
    was = {FORCE: 0.0, "step": 0, "since": 7}
    assert chosen(PotentialTask, found, was)[0] == [1, 2]
    found = rows(**{FORCE: [30, 10], ENERGY: [9, 3], "force_labels_meV_per_A": [90, 90]})
    assert chosen(PotentialTask, found, {FORCE: 20.0, "step": 0})[0] == [2]


def test_equal_validations_count_for_patience_and_keep_the_later_weights():
    kept, _, stopped = chosen(LanguageTask, rows(perplexity=[5, 5, 5]), patience=2)
    assert kept == [1, 2, 3] and (stopped["step"], stopped["since"]) == (3, 2)
    same = rows(score_percent=[0] * 4, mean_loss=[4, 3, 2, 1])
    assert chosen(SentenceTask, same, patience=2)[2] is None  # the loss still improves


@pytest.mark.parametrize(("task", "sign"), [(ImageTask, 1), (LanguageTask, -1)])
def test_validations_that_are_not_finite_are_never_the_best(task, sign):
    """A non-finite score or sum counts as a validation without improvement."""
    scores = [5, 9, 99, math.inf, NAN, 1]
    found = rows(**{task.best: [sign * score for score in scores]})
    kept, _, stopped = chosen(task, found, patience=4, diverged=(3, 5))
    assert kept == [1, 2] and (stopped["step"], stopped["best"]) == (6, sign * 9)


def test_the_mean_size_of_forces_is_measured():
    none = torch.zeros(0)
    errors = _Errors(torch.zeros(1), torch.zeros(3), none, none, torch.tensor([3e-3, -1e-3, 2e-3]))
    assert PotentialTask.sums.of(errors).metrics()["force_labels_meV_per_A"] == pytest.approx(2)
