"""What evaluations of models of proteins add: the unigram baseline, and the substitution table."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from molflt import plots
from molflt.evaluation.report import align
from molflt.sequence.heads import Head

__all__ = ["Unigram", "correlation", "draw_substitutions", "residue_table", "unigram_of"]

_ORDER = "CSTPAGNDEQHRKMILVFYW"  # alike ones beside each other, as Dayhoff's tables have them
_Results = Mapping[str, Mapping[str, float | None]]


class Unigram(NamedTuple):
    """The model that knows how often each token comes in training, and nothing else.

    p_i = (n_i + 1) / (n + ids), where the one is for tokens that training has not.
    """

    nats: NDArray[np.float64]
    """negative log-likelihood of each id, (ids,); infinite where an id cannot come"""
    best: int
    """the most frequent id"""

    @staticmethod
    def of(ids: NDArray[np.integer], possible: NDArray[np.bool_]) -> Unigram:
        """Counts a training text.

        Args:
            ids: (tokens,).
            possible: (ids,), which of them there are to choose from.
        """
        counts = np.bincount(ids, minlength=len(possible)).astype(np.float64)
        counts = np.where(possible, counts + 1, 0)
        with np.errstate(divide="ignore"):
            nats = -np.log(counts / counts.sum())
        return Unigram(nats, int(counts.argmax()))

    def judge(self, targets: NDArray[np.integer]) -> dict[str, float | None]:
        """Perplexity and accuracy on ids (n,): unigram_perplexity, unigram_accuracy_percent."""
        return {
            "unigram_perplexity": math.exp(self.nats[targets].mean()),
            "unigram_accuracy_percent": 100 * float((targets == self.best).mean()),
        }


def unigram_of(
    source: str, read: Callable[[], NDArray[np.integer]], possible: NDArray[np.bool_]
) -> tuple[Unigram | None, str]:
    """The baseline of a training file, or None and a line that says why there is none.

    Args:
        source: the file.
        read: gives its ids.
        possible: see `Unigram.of`.
    """
    if not Path(source).is_file():
        return None, f"unigram: none, because the training file {source} is not there"
    return Unigram.of(read(), possible), f"unigram: frequencies in {source}"


def residue_table(results: _Results) -> str:
    """A line per text: the model per residue, and beside it the baseline where there is one.

    Args:
        results: residue_perplexity, residue_accuracy_percent and residues of each text, and what
            `Unigram.judge` gives, if it was asked.
    """
    keys = ["residue_perplexity", "residue_accuracy_percent"]
    keys += ["unigram_perplexity", "unigram_accuracy_percent"]
    head = ("per residue", "perplexity", "right / %", "unigram", "right / %", "residues")
    lines: list[tuple[str, ...]] = [head]
    for name, row in results.items():
        cells = ("-" if row.get(key) is None else f"{row[key]:.2f}" for key in keys)
        lines.append((name, *cells, f"{row['residues']:,}"))
    return align(lines)


def draw_substitutions(head: Head, ids: Mapping[str, int], png: Path) -> tuple[Path, str]:
    """Draws how alike the output embeddings of the amino acids are, beside BLOSUM62.

    Cosines of the embeddings less their mean; Performer (arXiv:2009.14794), appendix, compares
    tables of this kind. BLOSUM62 is Biopython's; without it, the learned table stands alone.

    Args:
        head: whose weights are the embeddings.
        ids: of each letter.
        png: file to write.

    Returns:
        The file, and a line about it: the correlation of the two tables off the diagonal.
    """
    device = next(head.parameters()).device
    places = torch.tensor([ids[letter] for letter in _ORDER], device=device)
    with torch.inference_mode():
        vectors = head.embed(places).double().cpu().numpy()
    table = _cosines(vectors - vectors.mean(axis=0))
    tables, blosum = {"cosine of output embeddings": table}, _blosum()
    if blosum is None:
        note = f"{png.name}: without BLOSUM62, which needs Biopython: pip install biopython"
    else:
        r = correlation(table, blosum)
        tables["BLOSUM62"] = blosum
        note = f"{png.name}: correlation with BLOSUM62 over 190 pairs of amino acids {r:.3f}"
    plots.substitutions(tables, _ORDER, png)
    return png, note


def correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Pearson's, of two symmetric tables off their diagonals."""
    above = np.triu_indices(len(one), 1)
    return float(np.corrcoef(one[above], other[above])[0, 1])


def _cosines(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.maximum(norms, np.finfo(float).tiny)
    return unit @ unit.T


def _blosum() -> NDArray[np.float64] | None:
    """BLOSUM62 in the order of the picture; None without Biopython."""
    if importlib.util.find_spec("Bio") is None:
        return None
    from Bio.Align import substitution_matrices

    known = substitution_matrices.load("BLOSUM62")
    return np.array([[known[a, b] for b in _ORDER] for a in _ORDER], dtype=np.float64)
