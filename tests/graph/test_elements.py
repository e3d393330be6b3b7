"""Descriptors of elements, against tables of others."""

import math

import pytest
import torch

from molflt.graph.elements import DESCRIPTORS, descriptors, period_and_group
from molflt.graph.heads import ElementEmbedding


def test_descriptors_are_standardized_and_of_all_elements_that_bind():
    table = descriptors()
    assert table.shape == (119, len(DESCRIPTORS))
    unknown = table.isnan().any(dim=1).nonzero()[:, 0].tolist()
    assert unknown == [0, 2, 10, 18, *range(104, 119)]
    known = table[~table[:, 0].isnan()]
    torch.testing.assert_close(known.mean(dim=0), torch.zeros(8), rtol=0, atol=1e-5)
    torch.testing.assert_close(known.std(dim=0, correction=0), torch.ones(8), rtol=0, atol=1e-5)


def test_places_in_the_periodic_table():
    numbers = (1, 2, 6, 57, 72, 118)
    places = [(1, 1), (1, 18), (2, 14), (6, 3), (6, 4), (7, 18)]
    assert [period_and_group(number) for number in numbers] == places


def test_tables_agree_with_pymatgen():
    pymatgen = pytest.importorskip("pymatgen.core", reason="pymatgen is not installed")
    table = descriptors()[:, DESCRIPTORS.index("electronegativity")]
    known = [z for z in range(1, 104) if not math.isnan(table[z])]
    elements = [pymatgen.Element.from_Z(z) for z in known]
    assert [period_and_group(z) for z in known] == [(e.row, e.group) for e in elements]
    theirs = torch.tensor([float(e.X) for e in elements])
    ours = table[torch.tensor(known)]
    ratio = (theirs - theirs.mean()) / theirs.std(correction=0)
    torch.testing.assert_close(ours, ratio, rtol=0, atol=1e-5)


def test_training_leaves_out_vectors_of_elements() -> None:
    """Half of the elements of a step are known by descriptors only; evaluation uses all vectors."""
    torch.manual_seed(0)
    embedding = ElementEmbedding(4, descriptors=True)
    some = torch.tensor([1, 6, 8, 29, 78])
    by_descriptors = embedding.eval()(some).detach()
    with torch.no_grad():
        embedding.weight.fill_(1.0)
    torch.testing.assert_close(embedding(some), by_descriptors + 1)
    embedding.train()
    steps = torch.stack([embedding(some) - by_descriptors for _ in range(400)])
    assert set(steps.detach().round(decimals=4).unique().tolist()) == {0.0, 1.0}
    assert (steps.mean(dim=(0, 2)) - 0.5).abs().max() < 0.1
    plain = ElementEmbedding(4).train()
    torch.testing.assert_close(plain(some), plain.weight[some])
