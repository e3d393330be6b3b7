"""Baselines without gradient descent: kernel ridge regression, and the median of energies."""

from functools import cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from torch_geometric.data import Data

from molflt.atoms import Tag
from molflt.data.structures import Structures
from molflt.graph import PBCRadiusGraph
from molflt.graph.heads import element_descriptors

_Array = NDArray[np.float64]

CUTOFF, WIDTH, SHELLS = 6.0, 0.4, 12  # Å, Å, number of radial sums
MOST = 5_000  # maximum number of training systems, because the kernel grows quadratically


def describe(dataset: Structures, elements: list[int]) -> _Array:
    """Returns an array (systems, descriptors) with the descriptors of all systems."""
    return np.stack([descriptors(data, elements) for data in dataset])


def descriptors(data: Data, elements: list[int]) -> _Array:
    """Returns the element counts of the adsorbate, properties of the slab, and radial sums.

    The slab is described by means and standard deviations of the properties of its elements. These
    properties are also known for metals that do not occur in the training set. Radial sums are
    smeared counts of distances: from the adsorbate to the slab, without weights and weighted by
    each property, averaged over the adsorbate atoms; from each of its elements to the slab; and
    between each pair of its elements. All descriptors are invariant under rotations and lattice
    translations. Without tags, all atoms count as the adsorbate.
    """
    numbers, adsorbate = data.atomic_numbers.numpy(), _adsorbate(data)
    known = _properties()[numbers]
    slab = known[~adsorbate] if (~adsorbate).any() else np.zeros((1, known.shape[1]))
    counts = [float((numbers[adsorbate] == element).sum()) for element in elements]
    parts = [np.array(counts), slab.mean(axis=0), slab.std(axis=0)]

    place = {"pos": data.pos.double(), "cell": data.cell.double(), "pbc": data.pbc}
    edges = PBCRadiusGraph(CUTOFF)(Data(**place))
    source, target = edges.edge_index.numpy()
    shells = np.linspace(1.0, CUTOFF - 0.5, SHELLS)
    smeared = np.exp(-0.5 * ((edges.edge_weight.numpy()[:, None] - shells) / WIDTH) ** 2)
    inside = adsorbate[target] & adsorbate[source]
    across = adsorbate[target] & ~adsorbate[source]
    weights = np.column_stack([np.ones(len(numbers)), known])[source[across]]
    parts.append((weights.T @ smeared[across]).ravel() / adsorbate.sum())
    for i, element in enumerate(elements):
        own = numbers[target] == element
        parts.append(smeared[across & own].sum(axis=0))
        parts += [
            smeared[inside & own & (numbers[source] == other)].sum(axis=0) for other in elements[i:]
        ]
    return np.concatenate(parts)


@cache
def _properties() -> _Array:
    """Returns the properties of each element; unknown values are 0."""
    return np.nan_to_num(element_descriptors().numpy().astype(float))


def _adsorbate(data: Data) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = (data.tags == Tag.ADSORBATE).numpy()
    return found if found.any() else np.ones_like(found)


class KernelRidge:
    """Kernel ridge regression; cross-validation of the MAE selects kernel, width and penalty."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chosen: dict[str, float | str] = {}

    def fit(self, dataset: Structures, energies: _Array | None = None) -> None:
        """Fits the model to the energies of a data set, or to `energies` in eV if given."""
        from sklearn.kernel_ridge import KernelRidge as Ridge
        from sklearn.model_selection import GridSearchCV, KFold
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        numbers = (data.atomic_numbers[_adsorbate(data)].tolist() for data in dataset)
        self.elements = sorted(set(chain.from_iterable(numbers)))
        x = describe(dataset, self.elements)
        y = dataset.y_relaxed if energies is None else energies
        kept = np.random.default_rng(self.seed).permutation(len(y))[:MOST]
        x, y = x[kept], y[kept]
        self.mean, varying = float(y.mean()), max(1, int((np.ptp(x, axis=0) > 0).sum()))
        grid = {
            "kernelridge__kernel": ["rbf", "laplacian"],
            "kernelridge__alpha": [1e-3, 1e-2, 1e-1, 1.0],
            "kernelridge__gamma": [scale / varying for scale in (0.03, 0.1, 0.3, 1.0, 3.0)],
        }
        folds = KFold(min(5, len(y)), shuffle=True, random_state=self.seed)
        pipeline = make_pipeline(StandardScaler(), Ridge())
        score = "neg_mean_absolute_error"
        self.search = GridSearchCV(pipeline, grid, cv=folds, scoring=score)
        self.search.fit(x, y - self.mean)
        best = self.search.best_params_.items()
        self.chosen = {name.rpartition("_")[2]: value for name, value in best}
        self.chosen["tried"] = len(self.search.cv_results_["params"])

    def predict(self, dataset: Structures) -> _Array:
        """Returns the predicted energies (systems,) in eV."""
        return self.search.predict(describe(dataset, self.elements)) + self.mean


class Median:
    """Predicts the median of the training energies."""

    def __init__(self, seed: int) -> None:
        self.chosen: dict[str, float | str] = {}

    def fit(self, dataset: Structures) -> None:
        """Computes the median of a data set."""
        self.median = float(np.median(dataset.y_relaxed))

    def predict(self, dataset: Structures) -> _Array:
        """Returns the predicted energies (systems,) in eV."""
        return np.full(len(dataset), self.median)
