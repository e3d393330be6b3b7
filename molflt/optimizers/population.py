"""Learned optimizer that minimizes functions with a population, using only their values.

Members attend to each other.

See the second experiment in section 5.4 of FLT (arXiv:2302.01925). Attention between members
depends on their features and on an FLT mask f(x_i - x_j) of their positions. The paper does not
specify the features or the update.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from molflt.attention import Attention, Encoding, Stack
from molflt.attention.checks import at_least_one, no_effect, one_of, positive
from molflt.attention.encodings import Bias, Factors
from molflt.attention.features import FeatureMapName
from molflt.attention.numerics import randn64
from molflt.attention.positions.base import MixingName, differences
from molflt.attention.positions.spectral import GraphNodes, SpectralPosition
from molflt.attention.spectra import GaussianBasis
from molflt.attention.stack import Redrawn
from molflt.data.optimizers import generator_of

MEMBERS = 32
START_SCALE = 2.5
"""standard deviation of initial coordinates, half of `molflt.optimizers.functions.HALF_WIDTH`"""

_TINY = 1e-150  # smallest spread whose square does not underflow
_WIDTHS = (0.2, 2.0)  # widths of the mask, in units of the population's radius
_FEATURES = 16  # entries of a member's token; see `_tokens`
_START = (0.7, 0.0, 1.0, 0.1, 0.2)  # initial a, b, c, e, g
_PRESSURE = 4.0  # initially, the best member weighs exp(4) times as much as the worst
_KEPT = 0.8  # decay of the averaged movement per generation
_LEAST = 1e-12  # lower bound on weights, below which their square root has no useful gradient
_LARGEST = 3.0  # c and e are at most exp(3) times their initial values


class Noise(NamedTuple):
    """Standard normal random numbers for one generation, float64."""

    pairs: Tensor  # scalars, which do not change under rotation, (batch, members, members)
    vectors: Tensor  # (batch, members, d)


class PopulationState(NamedTuple):
    """State of a batch of independent populations; convergence requires positions in float64."""

    position: Tensor  # positions to evaluate next, (batch, members, d)
    best_position: Tensor  # best position of each member, (batch, members, d)
    best_value: Tensor  # best value of each member, at first infinite, (batch, members)
    age: Tensor  # generations since the best value was found, (batch, members)
    path: Tensor  # averaged movement of the mean of best positions, (batch, d)
    log_spread: Tensor  # logarithm of the initial spread of best positions, (batch,)
    waves: Tensor  # normal numbers that determine the nodes of the mask, (batch, nodes, d)
    generation: Tensor  # number of generations so far, (batch,) float64


class PopulationMask(SpectralPosition):
    """FLT mask of positions, sampled at separate nodes for each population.

    The same nodes for all populations would favor some directions in space. Node s is drawn from
    the initial density of Gaussian t = s mod T, N(0, 1 / (2 pi w_t)^2). Its weight is
    c_s = 1 / (r p(xi_s)), where p is the mixture of these r densities (FLT v1, eq. 5).
    """

    def __init__(self, spectrum: GaussianBasis, num_nodes: int) -> None:
        super().__init__(spectrum, None)
        self.num_nodes = num_nodes
        log_width = spectrum.log_width.detach().double()
        self.log_sigma = nn.Buffer(-log_width - math.log(2 * math.pi))

    def width(self, head_dim: int) -> int:
        return head_dim + 2 * self.num_nodes

    def evaluate(self, mixing: str, positions: Tensor, waves: Tensor) -> Encoding:
        """Computes the encoding of positions (batch, members, d)."""
        if mixing == "softmax":
            return Bias(self.bias(differences(positions, positions)))
        return Factors(*self.factors(positions, positions, self.nodes_of(waves)))

    def nodes_of(self, waves: Tensor) -> GraphNodes:
        """Computes nodes (batch, r, d) and weights from normal deviates `waves` (batch, r, d)."""
        sigma = self.log_sigma.to(waves)
        each = torch.arange(len(sigma), device=waves.device)
        place = torch.arange(self.num_nodes, device=waves.device) % len(sigma)
        count = (place == each[:, None]).sum(dim=-1)  # 0 for some Gaussians if r is below T
        xi = waves * sigma[place].exp()[:, None]
        square, d = xi.square().sum(dim=-1, keepdim=True), waves.shape[-1]
        log_p = -0.5 * square * (-2 * sigma).exp() - d * (sigma + 0.5 * math.log(2 * math.pi))
        log_rp = (log_p + count.to(log_p).log()).logsumexp(dim=-1)
        # float64, because g and 1 / p can exceed the range of float32; their product does not
        return GraphNodes(xi, (-log_rp).exp())


class PopulationModel(Redrawn):
    """Learned steps of a population of members with positions in R^d.

    Each member keeps its best position p_i. Its token consists of ranks, standardized values, ages,
    distances in units of the spread, and cosines, which do not depend on the position, orientation
    or scale of the population. Attention blocks refine the tokens. The heads of a final attention
    layer are combined into weights w_ij >= 0 with sum_j w_ij = 1, which determine

        m_i = sum_j w_ij p_j
        n_i = sum_j sqrt(w_ij) z_ij (p_j - m_i)
        x_i = p_i + a_i (m_i - p_i) + b_i (x_i - p_i) + c_i n_i + s e_i eps_i + g_i u

    Here z and eps are normal, s is the spread, and u is the averaged movement of the mean of p. The
    covariance of n_i equals the covariance of p weighted by w_ij. The numbers a, b, c, e and g are
    computed from the token of each member. All terms consist of differences and noise. A step is
    therefore equivariant under permutations of members and, if the noise is also transformed, under
    translations, rotations, reflections and scaling.

    Gradients pass through these sums but not through the tokens, because the derivative of
    attention with respect to positions makes long unrolls chaotic.

    Args:
        dimension: dimension d of the functions; the weights do not depend on it.
        dim: width of tokens, a multiple of `heads`.
        heads: number of attention heads.
        layers: number of blocks before the final attention layer.
        ffn_dim: hidden width of the feed-forward networks.
        position: "spectral" for FLT's mask of positions, in units of the population's radius, or
            "none" for a Performer or plain softmax attention.
        num_gaussians: number T of Gaussians of the mask, 8 by default.
        num_nodes: number r of nodes of the mask, 16 by default; softmax uses the exact mask.
        mixing: see `molflt.attention.Attention`.
        feature_map: see `molflt.attention.Attention`.
        num_features: see `molflt.attention.Attention`.
    """

    def __init__(
        self,
        dimension: int = 10,
        dim: int = 32,
        heads: int = 4,
        layers: int = 1,
        ffn_dim: int = 64,
        position: Literal["none", "spectral"] = "spectral",
        num_gaussians: int | None = None,
        num_nodes: int | None = None,
        mixing: MixingName = "auto",
        feature_map: FeatureMapName | None = None,
        num_features: int | None = None,
    ) -> None:
        super().__init__()
        at_least_one(dimension=dimension, dim=dim, heads=heads)
        one_of("position", position, ("none", "spectral"))
        self.dimension = dimension
        mask: PopulationMask | None = None
        if position == "none":
            no_effect("with position='none'", num_gaussians=num_gaussians, num_nodes=num_nodes)
        else:
            if mixing == "softmax":
                no_effect("with mixing='softmax', the exact mask", num_nodes=num_nodes)
            count = 8 if num_gaussians is None else num_gaussians
            basis = GaussianBasis(heads, count, dimension, _WIDTHS)
            mask = PopulationMask(basis, 16 if num_nodes is None else num_nodes)
        attention: dict[str, Any] = {"mixing": mixing, "feature_map": feature_map}
        attention["num_features"] = num_features
        self.embed = nn.Linear(_FEATURES, dim)
        self.stack = Stack(dim, heads, layers, ffn_dim=ffn_dim, position=mask, **attention)
        self.read = Attention(dim, heads, position=mask, **attention)
        self.read.share_position()
        for unused in ("to_value", "to_out"):  # the model uses only the attention weights
            self.read.add_module(unused, nn.Identity())
        self.head = nn.Linear(dim, heads + len(_START))
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)
        self.log_pressure = nn.Parameter(torch.tensor(math.log(_PRESSURE)))

    @property
    def waves(self) -> int:
        """Number of nodes of the mask per population; 0 if no mask is sampled."""
        mask = self.stack.position
        exact = self.read.mixing == "softmax"
        return mask.num_nodes if isinstance(mask, PopulationMask) and not exact else 0

    def of_dimension(self, dimension: int) -> "PopulationModel":
        """Returns a model with the same weights for functions of a different dimension."""
        at_least_one(dimension=dimension)
        if dimension == self.dimension:
            return self
        other = copy.deepcopy(self)
        other.dimension = dimension
        if isinstance(other.stack.position, PopulationMask):
            other.stack.position.dim = other.stack.position.spectrum.dim = dimension
        return other

    def start(self, position: Tensor, waves: Tensor) -> PopulationState:
        """Returns the state of populations before their first generation.

        Args:
            position: initial positions, (batch, members, d) float64.
            waves: normal numbers, (batch, `self.waves`, d) float64.
        """
        batch, members, d = position.shape
        unknown = position.new_full((batch, members), math.inf)
        none, path = position.new_zeros(batch), position.new_zeros(batch, d)
        age = torch.zeros_like(unknown)
        return PopulationState(position, position, unknown, age, path, none, waves, none)

    def forward(self, state: PopulationState, values: Tensor, noise: Noise) -> PopulationState:
        """Computes one generation and returns the state with the next positions to evaluate.

        `values` contains the function values at `state.position`: (batch, members), float64.
        """
        state, improved = _told(state, values)
        tokens, rank = self._tokens(state, values, improved)
        x, weights = self._attend(tokens, state, rank)
        out = self.head(x).to(state.position)
        heads = out[..., : -len(_START)].softmax(dim=-1)
        w = torch.einsum("bih,bhij->bij", heads, weights.to(heads))
        w = w / w.sum(dim=-1, keepdim=True)  # 1 only to the precision of the weights
        return state._replace(position=self._moved(state, w, out[..., -len(_START) :], noise))

    @staticmethod
    def _moved(state: PopulationState, w: Tensor, out: Tensor, noise: Noise) -> Tensor:
        """Computes x_i from `w` (batch, members, members) and `out` (batch, members, 5)."""
        best, (a, b, c, e, g) = state.best_position, out.split(1, dim=-1)
        toward = w @ best - best
        root = w.clamp(min=_LEAST).sqrt() * noise.pairs
        around = root @ best - root.sum(dim=-1, keepdim=True) * (best + toward)
        width = _spread(best.detach())[:, None, None]
        return (
            best
            + (_START[0] + a) * toward
            + (_START[1] + b) * (state.position - best)
            + _START[2] * _factor(c) * around
            + _START[3] * _factor(e) * width * noise.vectors
            + (_START[4] + g) * state.path[:, None]
        )

    def _tokens(
        self, state: PopulationState, values: Tensor, improved: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns features (batch, members, features), and the rank of each member's best value."""
        best, value = state.best_position.detach(), state.best_value.detach()
        spread, rank = _spread(best), _rank(value)
        first = value.argmin(dim=1)[:, None, None].expand(-1, 1, best.shape[2])
        away = best - best.mean(dim=1, keepdim=True)
        last = state.position.detach() - best
        lead = best.gather(1, first) - best
        moved = state.path.detach()[:, None].expand_as(best)
        unit = spread[:, None] * best.shape[2] ** 0.5
        lengths = [(x.norm(dim=-1) / unit).log1p() for x in (away, last, lead, moved)]
        cosines = [_cosine(last, lead), _cosine(moved, away), _cosine(moved, lead)]
        of_all = [2 * improved.mean(dim=1) - 1, (spread.log() - state.log_spread) / 5]
        of_all.append(state.generation.log1p() / 4)
        own = [2 * rank - 1, 2 * _rank(values) - 1, *_standardized(value, values)]
        own += [2 * improved - 1, state.age.log1p() / 2, *lengths, *cosines]
        own += [x[:, None].expand_as(rank) for x in of_all]
        return torch.stack(own, dim=-1), rank

    def _attend(
        self, tokens: Tensor, state: PopulationState, rank: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns refined tokens (batch, members, dim) and the attention weights of all heads."""
        x, encoding = self.embed(tokens.to(self.embed.weight)), None
        mask = self.stack.position
        if isinstance(mask, PopulationMask):
            best = state.best_position.detach()
            centered = best - best.mean(dim=1, keepdim=True)
            radius = _spread(best)[:, None, None] * best.shape[2] ** 0.5
            encoding = mask.evaluate(self.read.mixing, (centered / radius).to(x), state.waves.to(x))
        x = self.stack.norm(self.stack.one_pass(x, encoding))
        pressure = (self.log_pressure.exp() * rank.to(x)).clamp(max=80.0)  # keeps weights above 0
        weight = (-pressure).exp().nan_to_num(1.0)  # NaN if the model has diverged
        return x, self.read.weights(x, encoding=encoding, key_weight=weight)


def _told(state: PopulationState, values: Tensor) -> tuple[PopulationState, Tensor]:
    """Updates the best positions; also returns 1 for members that improved and 0 for others."""
    better = values < state.best_value
    best = torch.where(better[..., None], state.position, state.best_position)
    movement = best.mean(dim=1) - state.best_position.mean(dim=1)
    path = _KEPT * state.path + (1 - _KEPT**2) ** 0.5 * movement
    log_spread = _spread(best.detach()).log()
    return state._replace(
        best_position=best,
        best_value=torch.where(better, values, state.best_value),
        age=torch.where(better, 0.0, state.age + 1),
        path=path,
        log_spread=torch.where(state.generation > 0, state.log_spread, log_spread),
        generation=state.generation + 1,
    ), better.to(values)


def _spread(best: Tensor) -> Tensor:
    """Returns the root-mean-square deviation of positions: (batch, members, d) -> (batch,)."""
    centered = best - best.mean(dim=1, keepdim=True)
    return centered.square().mean(dim=(1, 2)).sqrt().clamp(min=_TINY)


def _rank(values: Tensor) -> Tensor:
    """Returns ranks from 0 (smallest) to 1 (largest); equal values have equal ranks."""
    values = values.detach()
    one, other = values[:, :, None], values[:, None]
    below = (other < one).sum(dim=-1) + 0.5 * ((other == one).sum(dim=-1) - 1)
    return below.to(values) / (values.shape[1] - 1)


def _standardized(best: Tensor, values: Tensor) -> list[Tensor]:
    """Standardizes both arguments with the moments of `best` and clamps them to [-3, 3]."""
    deviation, mean = torch.std_mean(best, dim=1, keepdim=True)
    unit = deviation.clamp(min=_TINY)
    return [((x - mean) / unit).nan_to_num(0.0).clamp(-3, 3) for x in (best, values.detach())]


def _cosine(one: Tensor, other: Tensor) -> Tensor:
    lengths = one.norm(dim=-1) * other.norm(dim=-1)
    return (one * other).sum(dim=-1) / lengths.clamp(min=_TINY)


def _factor(logit: Tensor) -> Tensor:
    """Maps numbers to factors between exp(-3) and exp(3); 0 is mapped to 1."""
    return (_LARGEST * (logit / _LARGEST).tanh()).exp()


class Populations:
    """Batch of independent populations, each determined by its seed alone.

    `center` is the mean of the initial positions, (d,) or one number, and `scale` is the standard
    deviation of their coordinates. `state` is on the device of the model. The noise is drawn on the
    CPU.
    """

    def __init__(
        self,
        model: PopulationModel,
        seeds: Sequence[int],
        members: int = MEMBERS,
        center: float | Sequence[float] | Tensor = 0.0,
        scale: float = START_SCALE,
    ) -> None:
        if members < 2:
            raise ValueError(f"a population needs at least 2 members; got {members=}")
        self.model, self.members = model, members
        self.device = model.log_pressure.device
        self.generators = [generator_of(seed, 1) for seed in seeds]
        middle = torch.as_tensor(center, dtype=torch.float64, device="cpu")
        position = middle.to(self.device) + scale * self._normal(members, model.dimension)
        self.state = model.start(position, self._normal(model.waves, model.dimension))

    def tell(self, values: Tensor) -> None:
        """Moves the members, using the values (batch, members) at `state.position`."""
        pairs = self._normal(self.members, self.members)
        vectors = self._normal(self.members, self.model.dimension)
        self.state = self.model(self.state, values, Noise(pairs, vectors))

    def _normal(self, *shape: int) -> Tensor:
        """Draws float64 normal numbers (batch, *shape) on the CPU and moves them to the device."""
        draws = [randn64(shape, generator=generator) for generator in self.generators]
        return torch.stack(draws).to(self.device)


class Best(NamedTuple):
    """Smallest value so far and its position."""

    position: Tensor
    """(d,) float64"""
    value: float


class PopulationOptimizer:
    """Minimizes a function with learned steps, using only its values.

    ::

        optimizer = PopulationOptimizer.from_run("runs/population", dimension=10)
        while optimizer.evaluations < 5000:
            members = optimizer.ask()
            optimizer.tell([function(x) for x in members])
        print(optimizer.best)

    Args:
        model: model that moves the members.
        members: number of members of the population, at least 2.
        seed: seed of the initial positions and of the noise.
        start: mean of the initial positions: one number for all coordinates, or d numbers.
        scale: standard deviation of the initial coordinates; it should be about the distance from
            `start` to the minimum.

    Attributes:
        evaluations: number of function evaluations so far.
    """

    def __init__(
        self,
        model: PopulationModel,
        members: int = MEMBERS,
        seed: int = 0,
        start: float | Sequence[float] | Tensor = 0.0,
        scale: float = START_SCALE,
    ) -> None:
        positive(scale=scale)
        with torch.no_grad():
            self._populations = Populations(model, [seed], members, start, scale)
        self.model = model
        self.members = members
        self.evaluations = 0
        self._asked = False

    @classmethod
    def from_run(
        cls,
        run: str | Path,
        dimension: int | None = None,
        members: int | None = None,
        seed: int = 0,
        start: float | Sequence[float] | Tensor = 0.0,
        scale: float = START_SCALE,
        checkpoint: str = "best",
    ) -> Self:
        """Creates the optimizer from a run folder of the recipe `population_optimizer`.

        By default, `dimension` and `members` have the values used in training. `checkpoint` is
        "best", "last", or a safetensors file. See the class for the other arguments.
        """
        from molflt.training.checkpoint import load_run

        model, config = load_run(Path(run), checkpoint, recipe="population_optimizer")
        assert isinstance(model, PopulationModel)
        model = model.of_dimension(model.dimension if dimension is None else dimension)
        members = config["task"]["members"] if members is None else members
        return cls(model, members, seed, start, scale)

    def ask(self) -> Tensor:
        """Returns the points to evaluate: float64 (members, d); only `tell` changes them."""
        self._asked = True
        return self._populations.state.position[0].cpu().clone()

    def tell(self, values: Tensor | Sequence[float]) -> None:
        """Moves the members, using the values at the points from `ask`.

        Args:
            values: (members,), finite numbers in the order of the points.
        """
        generation = self.generation
        if not self._asked:
            raise ValueError(
                f"tell before ask in generation {generation}; expected the values at the points "
                "that ask() returns; call ask() first"
            )
        given = torch.as_tensor(values, dtype=torch.float64, device="cpu").detach()
        if given.shape != (self.members,):
            shape = f"({self.members},), one for each member; got {tuple(given.shape)}"
            raise ValueError(f"values must have shape {shape}")
        if not bool(given.isfinite().all()):
            member = int((~given.isfinite()).nonzero()[0])
            raise ValueError(
                f"member {member} in generation {generation}: expected a finite value; got "
                f"{float(given[member])}; pass a large number where the function is undefined"
            )
        with torch.no_grad():
            self._populations.tell(given[None].to(self._populations.device))
        self.evaluations += self.members
        self._asked = False

    @property
    def generation(self) -> int:
        """Number of generations so far."""
        return int(self._populations.state.generation)

    @property
    def best(self) -> Best:
        """Smallest value so far, with its position; raises ValueError before the first `tell`."""
        state = self._populations.state
        member = int(state.best_value[0].argmin())
        value = float(state.best_value[0, member])
        if math.isinf(value):
            raise ValueError("best needs a call of tell(); got none; call ask() and tell() first")
        return Best(state.best_position[0, member].cpu().clone(), value)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the state of the population and of its random generator, without the weights."""
        state = self._populations.state._asdict()
        noise = self._populations.generators[0].get_state()
        kept = {**state, "noise": noise, "asked": torch.tensor(self._asked, device="cpu")}
        return {name: part.cpu().clone() for name, part in kept.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores a `state_dict`; with equal weights, later steps are bitwise identical."""
        populations = self._populations
        parts = {name: part.clone() for name, part in state.items()}
        populations.generators[0].set_state(parts.pop("noise"))
        self._asked = bool(parts.pop("asked"))
        on_device = {name: part.to(populations.device) for name, part in parts.items()}
        populations.state = PopulationState(**on_device)
        self.evaluations = self.generation * self.members
