"""What needs no gradients: kernel ridge on descriptors of a system, and the median of energies."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import Data

from molflt.atoms import MAX_ATOMIC_NUMBER, Tag
from molflt.data.structures import Structures
from molflt.graph import PBCRadiusGraph
from molflt.graph.elements import period_and_place

_Array = NDArray[np.float64]

CUTOFF, WIDTH, SHELLS = 6.0, 0.4, 12  # Å, Å, number of radial sums
MOST = 5_000  # systems that ridge is fitted to: its kernel grows with their square
_ELEMENTS = MAX_ATOMIC_NUMBER + 1


def describe(dataset: Structures) -> _Array:
    """Descriptors of all systems, (systems, numbers)."""
    return np.stack([descriptors(dataset[i]) for i in range(len(dataset))])


def descriptors(data: Data) -> _Array:
    """Composition, means and spreads of properties of elements, radial sums around the adsorbate.

    Composition and properties of slab and adsorbate apart. Radial sums: over pairs of an atom of
    the adsorbate and one of the slab, smeared, as they are and weighted by each property of the
    slab's atom; averaged over the atoms of the adsorbate. Invariant under turns and lattice shifts.
    Where tags are unknown, all atoms count as the adsorbate.
    """
    numbers = data.atomic_numbers.numpy()
    adsorbate = (data.tags == Tag.ADSORBATE).numpy()
    adsorbate = adsorbate if adsorbate.any() else np.ones(len(numbers), dtype=bool)
    known = _properties()[numbers]
    parts: list[_Array] = []
    for chosen in (adsorbate, ~adsorbate):
        own = known[chosen] if chosen.any() else np.zeros((1, known.shape[1]))
        counts = np.bincount(numbers[chosen], minlength=_ELEMENTS)
        counts = counts if chosen is adsorbate else counts / max(1, chosen.sum())
        parts += [counts.astype(float), own.mean(axis=0), own.std(axis=0)]
    place = {"pos": data.pos.double(), "cell": data.cell.double(), "pbc": data.pbc}
    edges = PBCRadiusGraph(CUTOFF)(Data(**place))
    source, target = edges.edge_index.numpy()
    pairs = adsorbate[target] & (~adsorbate[source] | adsorbate.all())
    shells = np.linspace(1.0, CUTOFF - 0.5, SHELLS)
    distance = edges.edge_weight.numpy()[pairs, None]
    smeared = np.exp(-0.5 * ((distance - shells) / WIDTH) ** 2)
    weights = np.column_stack([np.ones(len(numbers)), known])[source[pairs]]
    parts.append((weights.T @ smeared).ravel() / adsorbate.sum())
    return np.concatenate(parts)


def _properties() -> _Array:
    """Period, place in the period, covalent radius, Å, by atomic number, (elements, 3)."""
    from ase.data import covalent_radii

    places = [(0, 0), *map(period_and_place, range(1, _ELEMENTS))]  # there is no element 0
    return np.column_stack([places, covalent_radii[:_ELEMENTS]]).astype(float)


class KernelRidge:
    """Gaussian kernel ridge; its width and penalty by cross-validation inside of the training set.

    Args:
        seed: of the folds, and of the systems that are kept where there are too many.

    Attributes:
        chosen: what cross-validation chose, and among how many.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chosen: dict[str, float] = {}

    def fit(self, dataset: Structures) -> None:
        """Fits to a data set with energies.

        Raises:
            ImportError: without scikit-learn.
        """
        from sklearn.kernel_ridge import KernelRidge as Ridge
        from sklearn.model_selection import GridSearchCV, KFold
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        x, y = describe(dataset), dataset.y_relaxed
        kept = np.random.default_rng(self.seed).permutation(len(y))[:MOST]
        x, y = x[kept], y[kept]
        self.mean, varying = float(y.mean()), max(1, int((np.ptp(x, axis=0) > 0).sum()))
        grid = {
            "kernelridge__alpha": [1e-4, 1e-3, 1e-2, 1e-1, 1.0],
            "kernelridge__gamma": [scale / varying for scale in (0.01, 0.03, 0.1, 0.3, 1.0)],
        }
        folds = KFold(min(5, len(y)), shuffle=True, random_state=self.seed)
        pipeline = make_pipeline(StandardScaler(), Ridge(kernel="rbf"))
        score = "neg_mean_absolute_error"
        self.search = GridSearchCV(pipeline, grid, cv=folds, scoring=score)
        self.search.fit(x, y - self.mean)
        best = self.search.best_params_.items()
        self.chosen = {name.rpartition("_")[2]: float(value) for name, value in best}
        self.chosen["tried"] = len(self.search.cv_results_["params"])

    def predict(self, dataset: Structures) -> _Array:
        """Energies, (systems,), eV."""
        return self.search.predict(describe(dataset)) + self.mean


class Median:
    """Always the median of the training energies."""

    def __init__(self, seed: int) -> None:
        self.chosen: dict[str, float] = {}

    def fit(self, dataset: Structures) -> None:
        """Takes it from a data set."""
        self.median = float(torch.from_numpy(dataset.y_relaxed).quantile(0.5))

    def predict(self, dataset: Structures) -> _Array:
        """Energies, (systems,), eV."""
        return np.full(len(dataset), self.median)
