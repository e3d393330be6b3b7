from typing import Any

import numpy as np

from molflt.metrics import locality
from refusals import Refusal, refused


def local(weights: Any, distances: Any, option: str, got: str = "") -> Refusal:
    return refused(lambda: locality(weights, distances), option, "", got)


EYE = np.eye(3)
APART = np.abs(np.arange(3)[:, None] - np.arange(3)).astype(float)
ROWS = [
    local(2 * EYE, APART, "sum to 1", "2.0"),
    local(EYE, APART + np.diag([np.inf, 0, 0]), "unmasked", "0.0"),
]
