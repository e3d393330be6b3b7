import math
from pathlib import Path
from typing import Any

import contract
import pytest
import torch
import yaml
from contract import EXACT

from molflt.sequence import LanguageModel, heads
from molflt.sequence.generation import _choose, sample

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "lm"
SIZES = ("wikitext103", "wikitext2")
MECHANISMS = sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem not in SIZES)
VOCABULARY, LENGTH = 23, 19


def options(*names: str) -> dict[str, Any]:
    """Returns the model options of several files; later files take precedence."""
    found: dict[str, Any] = {}
    for name in names:
        found |= yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()).get("model") or {}
    return found


def tiny(mechanism: str, **changes: Any) -> LanguageModel:
    """Builds a small model with a configured mechanism whose mask has a visible effect."""
    torch.manual_seed(0)
    small = {"dim": 16, "heads": 2, "layers": 2, "ffn_dim": 24, "max_length": 40}
    given = {**options(mechanism), **small, **changes}
    model = LanguageModel(VOCABULARY, **contract.with_features(8, given)).eval()
    with torch.no_grad():
        for name, parameter in model.stack.named_parameters():
            if name.startswith("position.") and name.endswith(("amplitude", "table")):
                parameter.normal_()
    return model


def test_models_can_be_compiled() -> None:
    """A table of offsets limits the number of tokens."""
    model, tokens = tiny("nprf", layers=1), torch.randint(0, VOCABULARY, (2, LENGTH))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    torch.testing.assert_close(compiled(tokens), model(tokens), rtol=0, atol=1e-5)


def ids(batch: int = 2, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (batch, length), generator=generator)


@pytest.mark.parametrize(
    ("mechanism", "absolute"),
    [
        *((name, "none") for name in MECHANISMS),
        *(("performer", one) for one in ("sinusoidal", "learned")),
    ],
)
def test_decoding_equals_forward(mechanism, absolute):
    model = tiny(mechanism, absolute=absolute)
    if not model.decodes:
        with pytest.raises(ValueError, match="mixing|state"):
            model.decode(ids())
        return
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        model = model.to(dtype)
        tokens = ids()
        with torch.no_grad():
            expected = model.log_probabilities(model(tokens))
            found, state = model.decode(tokens[:, :7])
            pieces = [found]
            for token in tokens[:, 7:].split(1, dim=1):
                found, state = model.decode(token, state)
                pieces.append(found)
        assert state.length == LENGTH
        bounds = {"rtol": tolerance, "atol": tolerance}  # log-probabilities of size 1 to 10
        torch.testing.assert_close(torch.cat(pieces, dim=1), expected, **bounds)


@pytest.mark.parametrize("mechanism", ["performer", "flt-gaussian-mixture", "sine-spe"])
def test_decoding_far_out_in_float32(mechanism):
    """At position 10^4, positions and phases in `decode` equal those in `forward`."""
    model = tiny(mechanism, layers=1, absolute="sinusoidal", max_length=None)
    tokens = ids(1, 10_003)
    with torch.no_grad():
        expected = model(tokens)[:, -3:]
        _, state = model.advance(tokens[:, :-3])
        pieces = []
        for token in tokens[:, -3:].split(1, dim=1):
            hidden, state = model.advance(token, state)
            pieces.append(hidden)
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=0, atol=1e-5)


HEADS = {
    "plain": {},
    "untied": {"tie_embeddings": False},
    "adaptive": {"adaptive_cutoffs": [7, 15]},
}
HEADS["adaptive, untied"] = HEADS["adaptive"] | HEADS["untied"]


@pytest.mark.parametrize("name", HEADS)
def test_log_probabilities(name, monkeypatch):
    """`log_likelihood` returns the log-probability of each target, and 0 for the target -1."""
    model = tiny("performer", **HEADS[name]).double()
    tokens = ids(length=LENGTH + 1)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, 3] = targets[1, -2:] = -1
    log_p = model.log_probabilities(model(inputs))
    assert log_p.shape == (2, LENGTH, VOCABULARY)
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(2, LENGTH).double(), **EXACT)
    expected = log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets >= 0)
    found = model.log_likelihood(inputs, targets)
    torch.testing.assert_close(found, expected, **EXACT)
    assert torch.equal(model.log_likelihood(inputs.int(), targets.int()), found)
    for kind in (torch.uint8, torch.uint16):  # cannot hold -1
        whole = model.log_likelihood(inputs, tokens[:, 1:])
        assert torch.equal(model.log_likelihood(inputs.to(kind), tokens[:, 1:].to(kind)), whole)
    parameters = list(model.parameters())
    grads = torch.autograd.grad(found.sum(), parameters, allow_unused=True)
    monkeypatch.setattr(heads, "_AT_ONCE", 5 * model.head.width)
    pieces = model.log_likelihood(inputs, targets)
    torch.testing.assert_close(pieces, expected, **EXACT)
    again = torch.autograd.grad(pieces.sum(), parameters, allow_unused=True)
    torch.testing.assert_close(grads, again, **EXACT)


@pytest.mark.parametrize("name", HEADS)
def test_embeddings_are_tied(name):
    """Tied embeddings are rows of the output layer, which are projected for clusters."""
    model = tiny("performer", **HEADS[name]).double()
    rows = model.head.embed(torch.arange(VOCABULARY))
    hidden = torch.randn(16, dtype=torch.float64)
    x, _ = model._embed(torch.arange(VOCABULARY)[None], 0)
    if name.endswith("untied"):
        assert model.embedding is not None and (x[0] - 4 * rows).abs().max() > 0.1
        return
    torch.testing.assert_close(x[0], 16**0.5 * rows, **EXACT)
    log_p = model.log_probabilities(hidden)
    for cluster in [slice(0, 7), slice(7, 15), slice(15, 23)] if name == "adaptive" else [...]:
        scores = rows[cluster] @ hidden  # within one cluster, up to a constant
        torch.testing.assert_close(log_p[cluster] - log_p[cluster][0], scores - scores[0], **EXACT)
    assert not [key for key in model.state_dict() if key.startswith("embedding.")]


@pytest.mark.parametrize("mixing", ["linear", "softmax"])
def test_weights_in_half_precision_do_not_round_places(mixing):
    """Above 256, bfloat16 has only even integers; rounded positions change outputs by 5 to 7 %."""
    small = {"dim": 16, "heads": 2, "layers": 1, "position": "rotary", "mixing": mixing}
    model = LanguageModel(VOCABULARY, **small).eval().bfloat16()
    for layer in (model.stack.blocks[0].attention.to_query, model.stack.blocks[0].attention.to_key):
        layer.weight.data *= 3
    tokens = ids(1, 400)
    half, exact = model(tokens), model.float()(tokens)
    assert half.dtype == torch.bfloat16
    assert (half - exact)[:, 300:].norm() < 0.01 * exact[:, 300:].norm()


def test_position_scale_is_the_unit_of_length():
    """Halving the scale of positions and the widths of the mask gives the same model."""
    wide = tiny("flt-local", position_scale=1.0).double()
    narrow = tiny("flt-local", position_scale=0.5).double()
    narrow.load_state_dict(wide.state_dict())
    with torch.no_grad():
        narrow.stack.position.nodes.log_sigma += math.log(2)  # frequencies per unit
        narrow.stack.position.spectrum.log_radius -= math.log(2)
    a, b = (model(ids()) for model in (wide, narrow))
    torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize(
    ("mechanism", "changes", "longest"),
    [
        ("performer", {"absolute": "learned"}, 40),
        ("cosformer", {"position_scale": 0.5}, 80),
        ("conv-spe", {}, 40),
    ],
)
def test_lengths_beyond_the_mechanism(mechanism, changes, longest):
    model = tiny(mechanism, **changes)
    assert model.longest == longest
    model(ids(1, longest))
    with pytest.raises(ValueError, match=f"at most {longest} tokens; got {longest + 1}"):
        model(ids(1, longest + 1))


@pytest.mark.parametrize("mechanism", ["performer", "nprf"])  # with a state, and without one
def test_greedy_is_the_most_probable_token_of_the_whole_prefix(mechanism):
    model = tiny(mechanism)
    tokens = ids(1, 5)
    drawn = list(map(int, sample(model, tokens, 9, temperature=0)))
    assert len(drawn) == 9
    for token in drawn:
        log_p = model.log_probabilities(model(tokens)[:, -1])[0]
        assert log_p[token] > log_p.max() - 1e-5
        tokens = torch.cat((tokens, torch.tensor([[token]])), dim=1)


def test_seed_top_k_and_temperature():
    model = tiny("performer")
    prompt = ids(1, 4)

    def draw(seed: int, **options) -> list[int]:
        generator = torch.Generator("cpu").manual_seed(seed)
        return list(map(int, sample(model, prompt, 12, generator=generator, **options)))

    assert draw(0) == draw(0) != draw(1)
    greedy = draw(0, temperature=0)
    assert draw(0, top_k=1) == greedy == draw(1, temperature=1e-12)
    assert draw(0, top_k=VOCABULARY + 5, temperature=2.0) != greedy
    plain = draw(0)
    with torch.device("meta"):  # a default device other than that of the model
        assert draw(0) == plain


def test_draws_follow_the_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).repeat(20_000, 1)
    draw = torch.Generator().manual_seed(0)
    for options, allowed in (({}, 4), ({"top_k": 2}, 2), ({"temperature": 0.5}, 4)):
        found = _choose(logits, generator=draw, **options).bincount(minlength=4) / len(logits)
        scaled = logits[0] / options.get("temperature", 1.0)
        scaled[scaled < scaled.sort(descending=True).values[allowed - 1]] = -math.inf
        assert (found - scaled.softmax(0)).abs().max() < 0.015  # 4 standard errors
