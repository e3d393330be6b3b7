"""Output layers of language models, whose weights can serve as embeddings."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from molflt.attention.numerics import at_least_float32, recomputed
from molflt.attention.stack import ACTIVATIONS

_AT_ONCE = 2**27  # largest number of logits kept for the backward pass; others are recomputed
_SHRINK = 4.0  # ratio of the widths of neighboring clusters


class Head(nn.Module):
    """Base class for layers that map hidden states to log-probabilities, in at least float32.

    Attributes:
        width: number of logits per token that are stored at once.
    """

    width: int

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the output weights of token ids, for tied embeddings: (...) -> (..., dim)."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns unnormalized log-probabilities: (..., dim) -> (..., vocabulary)."""
        raise NotImplementedError

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Returns log-probabilities of all ids: (..., dim) -> (..., vocabulary)."""
        logits = self.logits(hidden)
        with torch.autocast(logits.device.type, enabled=False):
            return at_least_float32(logits).log_softmax(dim=-1)

    def log_likelihood(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Returns log p of the targets: (n, dim), (n,) -> (n,)."""
        return -F.cross_entropy(at_least_float32(self.logits(hidden)), targets, reduction="none")

    def score(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Computes `log_likelihood`, in pieces if the logits would need too much memory."""
        targets = targets.long()
        size = max(1, _AT_ONCE // self.width)
        if len(hidden) <= size:
            return self.log_likelihood(hidden, targets)
        pieces = zip(hidden.split(size), targets.split(size), strict=True)
        return torch.cat([recomputed(self.log_likelihood, *piece) for piece in pieces])


class _PlainHead(Head):
    """Linear layer without bias, followed by softmax over all ids."""

    def __init__(self, dim: int, vocabulary: int) -> None:
        super().__init__()
        self.width = vocabulary
        self.weight = nn.Parameter(torch.randn(vocabulary, dim) * dim**-0.5)

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)

    def excess(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean of log p over all ids minus log p of the target: (n, dim), (n,) -> (n,).

        The difference is h . (mean_k W_k - W_target), because the normalizers cancel.
        """
        with torch.autocast(hidden.device.type, enabled=False):
            weight = at_least_float32(self.weight)
            away = weight.mean(dim=0) - F.embedding(targets, weight)
            return torch.linalg.vecdot(hidden.to(weight.dtype), away)


class _AdaptiveHead(Head):
    """Adaptive softmax with clusters of rarer ids, each a quarter as wide as the previous cluster.

    Frequent ids have the full width. The head uses torch's implementation of Grave et al.
    (arXiv:1609.04309). Its weights also serve as adaptive inputs (Baevski and Auli,
    arXiv:1809.10853, "tied" weights and projections): an id of cluster c has the embedding
    E_c[id] P_c and the logit E_c[id] . (P_c h).
    """

    def __init__(self, dim: int, vocabulary: int, cutoffs: list[int]) -> None:
        super().__init__()
        if dim < _SHRINK ** len(cutoffs):
            raise ValueError(
                f"adaptive_cutoffs: {len(cutoffs)} clusters need dim of at least "
                f"{_SHRINK ** len(cutoffs):g}; got {dim}; use fewer cutoffs"
            )
        if not cutoffs or [0, *cutoffs, vocabulary] != sorted({0, *cutoffs, vocabulary}):
            raise ValueError(
                f"adaptive_cutoffs must increase up to {vocabulary - 1}; got {cutoffs}"
            )
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(dim, vocabulary, cutoffs, div_value=_SHRINK)
        # few tokens need the logits of rarer ids
        self.width = self.softmax.cutoffs[0] + len(cutoffs)
        nn.init.normal_(self.softmax.head.weight, std=dim**-0.5)
        for project, embedding in self._tails():
            nn.init.normal_(project, std=dim**-0.5)
            nn.init.normal_(embedding, std=len(project) ** -0.5)

    def _tails(self) -> list[tuple[Tensor, Tensor]]:
        """Returns P_c (width, dim) and E_c (ids, width) of each cluster."""
        tails = [cast(nn.Sequential, tail) for tail in self.softmax.tail]
        return [(cast(Tensor, t[0].weight), cast(Tensor, t[1].weight)) for t in tails]

    def embed(self, tokens: Tensor) -> Tensor:
        *starts, _ = self.softmax.cutoffs  # the last is the number of ids
        x = F.embedding(tokens.clamp(max=starts[0] - 1), self.softmax.head.weight)
        for start, (project, embedding) in zip(starts, self._tails(), strict=True):
            index = (tokens - start).clamp(0, len(embedding) - 1)
            in_cluster = (F.embedding(index, embedding) @ project).to(x.dtype)
            x = torch.where((tokens >= start)[..., None], in_cluster, x)
        return x

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            flat = hidden.to(self.softmax.head.weight.dtype).reshape(-1, hidden.shape[-1])
            return self.softmax.log_prob(flat).view(*hidden.shape[:-1], self.softmax.n_classes)

    def log_likelihood(self, hidden: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return self.softmax(hidden.to(self.softmax.head.weight.dtype), targets).output


class MaskedHead(Head):
    """Output layers of BERT (arXiv:1810.04805), with the embeddings as weights.

    log p = log softmax(E LN(gelu(W h + b)) + c), where E is the matrix of word embeddings.

    Args:
        words: word embeddings, which belong to another module.
        activation: "gelu" or "gelu_tanh"; see `molflt.attention.Block`.
        norm_eps: constant that LayerNorm adds to the variance.
    """

    def __init__(self, words: nn.Embedding, activation: str, norm_eps: float) -> None:
        super().__init__()
        self.width, dim = words.num_embeddings, words.embedding_dim
        self.dense = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim, norm_eps)
        self.bias = nn.Parameter(torch.zeros(self.width))
        self.activation = ACTIVATIONS[activation]
        self._words = (words,)  # in a tuple, because the encoder registers and saves the embeddings

    def best(self, hidden: Tensor) -> Tensor:
        """Returns the most probable ids, computed in pieces as in `score`: (n, dim) -> (n,)."""
        pieces = hidden.split(max(1, _AT_ONCE // self.width))
        return torch.cat([self.logits(piece).argmax(dim=-1) for piece in pieces])

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self._words[0].weight)

    def logits(self, hidden: Tensor) -> Tensor:
        x = self.norm(F.gelu(self.dense(hidden), approximate=self.activation))
        return F.linear(x, self._words[0].weight, self.bias)
