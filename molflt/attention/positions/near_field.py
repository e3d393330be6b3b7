"""Exact positional kernel for pairs within a cutoff."""

import torch
from torch import Tensor, nn

from molflt.attention.mixing.pairs import Pairs
from molflt.attention.numerics import at_least_float32, distances, fade, options_of
from molflt.attention.spectra import Spectrum


class NearField(nn.Module):
    """Correction that makes a positional kernel exact for pairs closer than a cutoff.

    The kernel is A_ij = [h_far + s(r_ij) (h_near - h_far)] phi(q_i) . phi(k_j) with h_near(z) =
    exp(f(z)). As in an Ewald sum, a few nodes represent the smooth far part, and pairs of neighbors
    represent the sharp near part. The switch s is 1 up to `onset` times the cutoff and falls to 0
    at the cutoff; it is twice differentiable. With `exact` the product of features is also
    corrected, and the attention of near pairs is that of softmax: A_ij = (1 - s) h_far phi(q_i) .
    phi(k_j) + s exp(q_i . k_j + f).

    Args:
        spectrum: family of f, of which only the exact mask is used.
        cutoff: largest distance, in units of length (Å).
        onset: fraction of the cutoff up to which the kernel equals h_near.
        exact: see above; for feature maps that estimate exp(q . k).
    """

    extra_repr = options_of

    def __init__(
        self, spectrum: Spectrum, cutoff: float = 4.5, onset: float = 0.5, exact: bool = False
    ) -> None:
        super().__init__()
        if cutoff <= 0 or not 0 <= onset < 1:
            raise ValueError(
                f"expected a cutoff above 0 and an onset in [0, 1); got cutoff={cutoff}, "
                f"onset={onset}"
            )
        self.spectrum = spectrum
        self.cutoff = cutoff
        self.onset = onset
        self.exact = exact

    def switch(self, distance: Tensor) -> Tensor:
        """Returns s(r), with the shape of the distances."""
        return fade((distance / self.cutoff - self.onset) / (1 - self.onset))

    def forward(self, pairs: Pairs, vector: Tensor, far: Tensor) -> Pairs:
        """Returns pairs with their corrections.

        Args:
            pairs: indices of the tokens; weights are ignored.
            vector: r_j - r_i or its negative, (pairs, l).
            far: h_far of these pairs, (heads, pairs).
        """
        with torch.autocast(vector.device.type, enabled=False):
            vector = at_least_float32(vector)
            f, s = self.spectrum.mask(vector[None])[0], self.switch(distances(vector))
            if self.exact:
                return pairs._replace(weight=-s * far, exact=(f, s))
            return pairs._replace(weight=s * (f.exp() - far))
