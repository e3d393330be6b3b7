"""Base class for rules that approximate the integral in FLT v1, eq. 4, by a sum over nodes."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from molflt.attention.spectra import Spectrum


class Nodes(nn.Module):
    """Base class for rules with nodes xi_s and weights c_s: integral g ~= sum_s c_s g(xi_s).

    A new rule overrides `forward` and is registered in `NODES`. Its constructor may take the heads
    and the dim of a spectrum, the spectrum itself as `density`, and `num_nodes`.
    """

    paper: ClassVar[str] = ""  #: source of the rule
    random: ClassVar[bool] = False  #: True if nodes are drawn at random
    normalized = False  #: True if the weights of each shell sum to 1, as `ShellWeights` requires
    num_nodes: int  #: number of nodes r
    dim: int  #: dimension l of positions

    def forward(self) -> tuple[Tensor, Tensor]:
        """Returns nodes (heads or 1, r, l), in cycles / length, and weights (heads or 1, r)."""
        raise NotImplementedError(f"{type(self).__name__} must override forward()")

    def sample(self, spectrum: Spectrum) -> tuple[Tensor, Tensor]:
        """Returns nodes (heads or 1, r, l) and coefficients c_s g(xi_s) of shape (heads, r)."""
        xi, weights = self()
        return xi, weights * spectrum.spectrum(xi)

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draws new nodes in place; use the same seed on every rank."""

    def check(self, spectrum: Spectrum) -> None:
        """Raises ValueError if these nodes cannot sample the spectrum."""
        if spectrum.on_shells != self.normalized:
            raise ValueError(
                "ShellWeights require ShellNodes with normalized=True, and vice versa; got "
                f"{type(spectrum).__name__} and {type(self).__name__}"
            )
        if spectrum.on_shells:
            radii, shells = spectrum.get_buffer("radius"), self.get_buffer("shell_radius")
            same = radii.shape == shells.shape
            if not same or not (radii.is_meta or torch.allclose(radii, shells.to(radii))):
                raise ValueError(f"ShellWeights need the radii of the shells; got {radii}")


def hermitian(spectrum: Spectrum, xi: Tensor) -> Tensor:
    """Returns (g(xi) + conj g(-xi)) / 2, the part of g that determines the mask.

    One node with twice the weight can then replace xi and -xi, for even and odd masks, because the
    cos and sin columns of xi and -xi are equal up to sign.
    """
    return 0.5 * (spectrum.spectrum(xi) + spectrum.spectrum(-xi).conj())
