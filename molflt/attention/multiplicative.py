"""A positional kernel that multiplies the products of features, exact for near pairs on demand."""

from typing import Any, Self

import torch
from torch import Tensor, nn

from molflt.attention.encoding import Encoding, Pairs, differences
from molflt.attention.mixing import Features, Sums, at_least_float32, stabilize
from molflt.attention.nodes import Nodes
from molflt.attention.radial import distances, fade
from molflt.attention.recompute import recomputed
from molflt.attention.spectra import Spectrum
from molflt.attention.spectral import GraphNodes, SpectralPosition

TRANSIENT = 2**22  # numbers that one chunk of columns or pairs may hold at once


def linear_with_kernel(
    query: Features,
    key: Features,
    value: Tensor,
    kernel: tuple[Tensor, Tensor],
    pairs: Pairs | None = None,
) -> Sums:
    """A_ij = (U_i . V_j + w_ij) phi(q_i) . phi(k_j) in time O(N m p dv + pairs (m + dv)).

    Column by column of U and V, sum_s U_is phi(q_i) . [sum_j phi(k_j) V_js v_j], so that the
    Kronecker product of features and factors, (N, m p), never exists; chunks of columns and of
    pairs are computed again in the backward pass instead of being kept.

    Args:
        query: (batch, heads, queries, m).
        key: (batch, heads, keys, m), zero for keys to be left out.
        value: (batch, heads, keys, dv).
        kernel: U (batch or 1, heads or 1, queries, p) and V (batch or 1, heads or 1, keys, p).
        pairs: w.
    """
    with torch.autocast(value.device.type, enabled=False):
        phi_q, phi_k, shift = stabilize(query.full(), key.full())
        value = at_least_float32(value)
        value = torch.cat((value, torch.ones_like(value[..., :1])), dim=-1)
        left, right = (at_least_float32(factor) for factor in kernel)
        sums = torch.zeros_like(phi_q[..., :1]).expand(*phi_q.shape[:-1], value.shape[-1])
        chunk = max(1, TRANSIENT // max(1, value.numel()))
        for start in range(0, left.shape[-1], chunk):
            part = slice(start, start + chunk)
            sums = sums + recomputed(
                _columns, phi_q, phi_k, value, left[..., part], right[..., part]
            )
        if pairs is not None:
            sums = sums + _pair_sums(phi_q, phi_k, value, pairs)
        return Sums(sums[..., :-1], sums[..., -1:], shift)


def _columns(phi_q: Tensor, phi_k: Tensor, value: Tensor, left: Tensor, right: Tensor) -> Tensor:
    columns = right.shape[-1]
    waves = (right[..., :, None] * value[..., None, :]).flatten(-2)  # [b, h, key, p dv]
    mixed = phi_q @ (phi_k.transpose(-1, -2) @ waves)
    return torch.einsum(
        "bhns,bhnsv->bhnv", left.expand(*mixed.shape[:-1], -1), mixed.unflatten(-1, (columns, -1))
    )


def _pair_sums(phi_q: Tensor, phi_k: Tensor, value: Tensor, pairs: Pairs) -> Tensor:
    """sum_j w_ij phi_i . phi_j v_j over the pairs: (batch, heads, queries, dv)."""
    batch, heads, queries, m = phi_q.shape
    out = value.new_zeros(batch * queries, heads, value.shape[-1])
    weight = at_least_float32(pairs.weight).expand(heads, -1).T  # [pair, h]
    chunk = max(1, TRANSIENT // (heads * (m + value.shape[-1])))
    for start in range(0, len(pairs.query), chunk):
        part = slice(start, start + chunk)
        places = pairs.batch[part], pairs.query[part], pairs.key[part]
        added = recomputed(_messages, phi_q, phi_k, value, weight[part], *places)
        out = out.index_add(0, places[0] * queries + places[1], added)
    return out.unflatten(0, (batch, queries)).transpose(1, 2)


def _messages(
    phi_q: Tensor, phi_k: Tensor, value: Tensor, weight: Tensor, b: Tensor, i: Tensor, j: Tensor
) -> Tensor:
    product = (phi_q[b, :, i] * phi_k[b, :, j]).sum(dim=-1)  # [pair, h]
    return (product * weight)[..., None] * value[b, :, j]


def with_exact_pairs(sums: Sums, query: Tensor, key: Tensor, value: Tensor, pairs: Pairs) -> Sums:
    """Sums to which s exp(q_i . k_j + f_ij) of the pairs is added, without any random feature.

    Args:
        sums: of all pairs of tokens.
        query: (batch, heads, queries, d), scaled.
        key: (batch, heads, keys, d), scaled.
        value: (batch, heads, keys, dv).
        pairs: with `exact`.
    """
    assert pairs.exact is not None
    with torch.autocast(value.device.type, enabled=False):
        query, key, value = (at_least_float32(x) for x in (query, key, value))
        f, switch = (at_least_float32(x) for x in pairs.exact)
        logit = (products(query, key, pairs) + f).T  # [pair, h]
        batch, heads, queries, _ = query.shape
        row = pairs.batch * queries + pairs.query
        before = sums.log_scale.expand(batch, heads, queries, 1).transpose(1, 2).flatten(0, 1)
        index = row[:, None].expand(-1, heads)
        highest = before[..., 0].scatter_reduce(0, index, logit.detach(), "amax")  # [b n, h]
        weight = (logit - highest[row]).exp() * switch[:, None]
        value = torch.cat((value, torch.ones_like(value[..., :1])), dim=-1)
        added = value.new_zeros(batch * queries, heads, value.shape[-1])
        chunk = max(1, TRANSIENT // (heads * value.shape[-1]))
        for start in range(0, len(row), chunk):
            part = slice(start, start + chunk)
            messages = recomputed(
                _weighted, value, weight[part], pairs.batch[part], pairs.key[part]
            )
            added = added.index_add(0, row[part], messages)
        added, shift = (
            x.unflatten(0, (batch, queries)).transpose(1, 2) for x in (added, highest[..., None])
        )
        scale = (sums.log_scale - shift).exp()
        return Sums(
            sums.numerator * scale + added[..., :-1],
            sums.normalizer * scale + added[..., -1:],
            shift,
        )


def _weighted(value: Tensor, weight: Tensor, b: Tensor, j: Tensor) -> Tensor:
    return weight[..., None] * value[b, :, j]


def products(left: Tensor, right: Tensor, pairs: Pairs) -> Tensor:
    """U_i . V_j of single pairs: (batch or 1, heads or 1, n, p) each -> (heads, pairs).

    The weight of `pairs` is not used.
    """
    batch = max(len(left), len(right))
    if batch * left.shape[-2] * right.shape[-2] <= 4 * len(pairs.query):
        matrix = left @ right.transpose(-1, -2)  # of few tokens: cheaper than to gather the factors
        return matrix.expand(batch, -1, -1, -1)[pairs.batch, :, pairs.query, pairs.key].T
    found = []
    chunk = max(1, TRANSIENT // (left.shape[1] * left.shape[-1]))
    for start in range(0, len(pairs.query), chunk):
        part = slice(start, start + chunk)
        places = pairs.batch[part], pairs.query[part], pairs.key[part]
        found.append(recomputed(_products, left, right, *places))
    return torch.cat(found).T if found else left.new_zeros(left.shape[1], 0)


def _products(left: Tensor, right: Tensor, b: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (left[b, :, i] * right[b, :, j]).sum(dim=-1)


class KernelPosition(SpectralPosition):
    """The positional kernel h itself is learned: A_ij = h(r_i - r_j) phi(q_i) . phi(k_j).

    h(z) = background + f(z), f and its Fourier factors as in `SpectralPosition`. Only differences
    of positions enter, whatever the feature map, and nothing is exponentiated: the additive
    placement sees the factors one by one through phi. The kernel of cosFormer is the case r = 1.

    h may become negative where it is learned so, or where few nodes make the factors ripple: count
    such rows in `Attention.sums(...).normalizer`, and bound them by `Attention(floor=...)`.

    Args:
        spectrum: family of f.
        nodes: where its transform is sampled.
        background: what two tokens far apart see of each other. 1: all pairs are alike at first.
            0 for periodic crystals: a constant for each pair would double with the cell.
    """

    positive = 1e-9  # least h whose logarithm softmax attention takes

    def __init__(self, spectrum: Spectrum, nodes: Nodes, background: float = 1.0) -> None:
        super().__init__(spectrum, nodes)
        self.background = background

    @classmethod
    def build(
        cls,
        heads: int,
        dim: int = 3,
        spectrum: str = "gaussian_basis",
        num_nodes: int = 16,
        background: float = 1.0,
        **options: Any,
    ) -> Self:
        """From the names of its parts: see `SpectralPosition.build`."""
        position = super().build(heads, dim, spectrum, num_nodes, **options)
        position.background = background
        return position

    def width(self, head_dim: int) -> int:
        """d: nothing is appended."""
        return head_dim

    def forward(self, mixing: str, query_positions: Tensor, key_positions: Tensor) -> Encoding:
        """The logarithm of the exact kernel for softmax, else its factors."""
        if mixing == "softmax":
            return Encoding(bias=self.bias(differences(query_positions, key_positions)))
        return Encoding(kernel=self.factors(query_positions, key_positions))

    def bias(self, delta: Tensor) -> Tensor:
        """log h: differences (batch, queries, keys, l) -> (batch, heads, queries, keys)."""
        return self.kernel(delta).clamp(min=self.positive).log()

    def kernel(self, delta: Tensor) -> Tensor:
        """Exact h: differences (batch, ..., l) -> (batch, heads, ...)."""
        return super().bias(delta) + self.background

    def factors(
        self, query_positions: Tensor, key_positions: Tensor, nodes: GraphNodes | None = None
    ) -> tuple[Tensor, Tensor]:
        """U and V with U_i . V_j ~= h(r_i - r_j), of 2r columns, or 2r + 1 with a background."""
        left, right = super().factors(query_positions, key_positions, nodes)
        if not self.background:
            return left, right
        one, constant = left.new_ones(()), right.new_full((), self.background)
        return (
            torch.cat((left, one.expand_as(left[..., :1])), dim=-1),
            torch.cat((right, constant.expand_as(right[..., :1])), dim=-1),
        )


class NearField(nn.Module):
    """Makes a positional kernel exact for pairs nearer than a cutoff.

    A_ij = [h_far + s(r_ij) (h_near - h_far)] phi(q_i) . phi(k_j), h_near(z) = exp(f(z)): a few
    nodes carry what is smooth and far, and neighbors what is sharp and near, as in an Ewald sum.
    s is 1 up to `onset` times the cutoff and goes to 0 at the cutoff, twice differentiable.
    With `exact` the product of features is corrected as well, and attention of near pairs is that
    of softmax: A_ij = (1 - s) h_far phi(q_i) . phi(k_j) + s exp(q_i . k_j + f).

    Args:
        spectrum: family of f, of which only the exact mask is used.
        cutoff: in units of length (Å).
        onset: share of the cutoff up to which the kernel is h_near alone.
        exact: see above; for feature maps that estimate exp(q . k).
    """

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
        """s(r), of the shape of the distances."""
        return fade((distance / self.cutoff - self.onset) / (1 - self.onset))

    def forward(self, pairs: Pairs, vector: Tensor, far: Tensor) -> Pairs:
        """Pairs with what has to be added for each.

        Args:
            pairs: which tokens; the weight is not used.
            vector: r_j - r_i or its negative, (pairs, l).
            far: h_far of the same pairs, (heads, pairs).
        """
        with torch.autocast(vector.device.type, enabled=False):
            vector = at_least_float32(vector)
            f, s = self.spectrum.mask(vector[None])[0], self.switch(distances(vector))
            if self.exact:
                return pairs._replace(weight=-s * far, exact=(f, s))
            return pairs._replace(weight=s * (f.exp() - far))

    def extra_repr(self) -> str:
        """Sizes, for `print(module)`."""
        return f"cutoff={self.cutoff:g}, onset={self.onset:g}"
