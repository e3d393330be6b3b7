"""Evaluation of protein models: the unigram baseline and similarities of amino acids."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from molflt import plots
from molflt.evaluation.common import device_of
from molflt.evaluation.results import Results, results_table
from molflt.sequence.heads import Head

__all__ = ["Residues", "correlation", "draw_substitutions"]

_ORDER = "CSTPAGNDEQHRKMILVFYW"  # similar amino acids are adjacent, as in Dayhoff's tables
_COLUMNS = {
    "residue_perplexity": ("perplexity", 2),
    "residue_accuracy_percent": ("right / %", 2),
    "unigram_perplexity": ("unigram", 2),
    "unigram_accuracy_percent": ("unigram right / %", 2),
    "residues": ("residues", 0),
}


class Residues:
    """Metrics of residues, and of the unigram model of the training file if that file exists.

    The unigram model has p_i = (n_i + 1) / (n + ids); thus, tokens that are missing in the file
    have a finite loss.

    Args:
        source: the training file.
        read: function that returns the token ids of the file.
        possible: mask of the ids that can be predicted, (ids,).
    """

    def __init__(
        self, source: str, read: Callable[[], NDArray[np.integer]], possible: NDArray[np.bool_]
    ) -> None:
        self._counts: NDArray[np.float64] | None = None
        self._note = f"no unigram model, because the training file {source} is missing"
        if Path(source).is_file():
            counts = np.bincount(read(), minlength=len(possible)).astype(np.float64)
            self._counts = np.where(possible, counts + 1, 0)
            self._note = f"unigram: frequencies in {source}"

    def judge(
        self, perplexity: float | None, accuracy: float | None, targets: NDArray[np.integer]
    ) -> dict[str, float | None]:
        """Returns metrics for residues with ids `targets`, (n,), including those of the model."""
        metrics: dict[str, float | None] = {
            "residue_perplexity": perplexity,
            "residue_accuracy_percent": accuracy,
            "residues": len(targets),
        }
        if (counts := self._counts) is not None:
            nats = -np.log(counts[targets] / counts.sum())
            metrics["unigram_perplexity"] = math.exp(nats.mean())
            hits = targets == counts.argmax()
            metrics["unigram_accuracy_percent"] = 100 * float(hits.mean())
        return metrics

    def report(self, results: Results, head: Head, ids: Mapping[str, int], png: Path) -> str:
        """Draws the similarities of amino acids; returns a table of residue metrics with notes."""
        table = results_table("per residue", _COLUMNS, results)
        return f"\n\n{table}\n\n{self._note}\n{draw_substitutions(head, ids, png)}"


def draw_substitutions(head: Head, ids: Mapping[str, int], png: Path) -> str:
    """Draws the similarity of the output embeddings of amino acids next to BLOSUM62.

    The similarity is the cosine between embeddings after subtracting their mean; compare the
    appendix of Performer (arXiv:2009.14794). Without Biopython, which provides BLOSUM62, only the
    learned table is drawn. Returns a line with the correlation between the two tables.
    """
    places = torch.tensor([ids[letter] for letter in _ORDER], device=device_of(head))
    with torch.inference_mode():
        vectors = head.embed(places).double().cpu().numpy()
    vectors = vectors - vectors.mean(axis=0)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.maximum(norms, np.finfo(float).tiny)
    table = unit @ unit.T
    tables, blosum = {"cosine of output embeddings": table}, _blosum()
    if blosum is None:
        note = f"{png.name}: without BLOSUM62, which needs Biopython: pip install biopython"
    else:
        r = correlation(table, blosum)
        tables["BLOSUM62"] = blosum
        note = f"{png.name}: correlation with BLOSUM62 over 190 pairs of amino acids {r:.3f}"
    plots.substitutions(tables, _ORDER, png)
    return note


def correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Returns Pearson's correlation between two symmetric tables, ignoring the diagonals."""
    above = np.triu_indices(len(one), 1)
    return float(np.corrcoef(one[above], other[above])[0, 1])


def _blosum() -> NDArray[np.float64] | None:
    """Returns BLOSUM62 in the order of the picture; None without Biopython."""
    if importlib.util.find_spec("Bio") is None:
        return None
    from Bio.Align import substitution_matrices

    known = substitution_matrices.load("BLOSUM62")
    return np.array([[known[a, b] for b in _ORDER] for a in _ORDER], dtype=np.float64)
