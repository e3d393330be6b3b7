"""Random matrices whose rows w_s project queries and keys in random feature maps."""

from collections.abc import Callable

import torch
from torch import Tensor


def iid_projection(rows: int, dim: int, generator: torch.Generator | None = None) -> Tensor:
    """Rows drawn independently from N(0, I).

    Args:
        rows: number of random features m.
        dim: dimension of the projected vectors.
        generator: source of randomness; torch's global one if None.

    Returns:
        (rows, dim) float64.
    """
    return torch.randn(rows, dim, dtype=torch.float64, generator=generator)


def orthogonal_projection(rows: int, dim: int, generator: torch.Generator | None = None) -> Tensor:
    """Rows with the marginal N(0, I), orthogonal within each block of `dim` rows (R-ORF).

    Directions are the rows of Haar-distributed orthogonal matrices; norms are drawn independently
    from the chi distribution with `dim` degrees of freedom, so that every single row is an exact
    standard normal and the kernel estimate stays unbiased.
    Performer (arXiv:2009.14794), section 2.4.

    Args:
        rows: number of random features m.
        dim: dimension of the projected vectors.
        generator: source of randomness; torch's global one if None.

    Returns:
        (rows, dim) float64.
    """
    blocks = []
    for start in range(0, rows, dim):
        gaussian = torch.randn(dim, dim, dtype=torch.float64, generator=generator)
        q, r = torch.linalg.qr(gaussian)
        # Without the sign of diag(R), LAPACK's choice of signs makes Q depart from Haar measure,
        # which biases the estimator.
        q = q * torch.sign(torch.diagonal(r))
        blocks.append(q[: rows - start])
    directions = torch.cat(blocks) if blocks else torch.empty(0, dim, dtype=torch.float64)
    norms = torch.randn(rows, dim, dtype=torch.float64, generator=generator).norm(dim=-1)
    return norms[:, None] * directions


PROJECTIONS: dict[str, Callable[[int, int, torch.Generator | None], Tensor]] = {
    "iid": iid_projection,
    "orthogonal": orthogonal_projection,
}
