from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from contract import EXACT
from safetensors.torch import load_file
from torch import Tensor

from molflt.sequence import MaskedLanguageModel, PixelModel, SequenceClassifier, TokenEncoder
from molflt.sequence.published import is_transformers, options_of, renamed

VOCABULARY, LENGTH = 29, 11


def small(kind=TokenEncoder, **options):
    torch.manual_seed(0)
    sizes = {"dim": 16, "heads": 2, "layers": 2, "ffn_dim": 24, "max_length": LENGTH}
    return kind(VOCABULARY, **{**sizes, **options}).double().eval()


def ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def published(kind: str, folder: Path, **sizes: int):
    """Builds a random float64 model of the package `transformers`, and writes its files."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "vocab_size": 29}
    sizes = {**small, "max_position_embeddings": LENGTH, **sizes}
    if kind == "Bert":
        sizes["num_attention_heads"] = 4
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}ForPreTraining")(config)
    for parameter in model.parameters():  # many are initialized with zeros or ones
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return model.double().eval(), config


@pytest.mark.parametrize("kind", ["Bert", "FNet"])
def test_published_weights_give_published_outputs(kind, tmp_path):
    theirs, config = published(kind, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert is_transformers(stored)
    weights = renamed(stored)
    ours = MaskedLanguageModel(**options_of(weights, config.to_dict()))
    left = ours.load_state_dict(weights, strict=False)
    assert left.unexpected_keys == [] and set(left.missing_keys) == {"mask_id", "ordinary"}
    ours = ours.double().eval()
    tokens, types = ids(3, 9), ids(3, 9, seed=2) % 2
    padded = {} if kind == "FNet" else {"attention_mask": torch.ones(3, 9, dtype=torch.bool)}
    if padded:
        padded["attention_mask"][1, 5:] = False
    with torch.no_grad():
        wanted = theirs(tokens, token_type_ids=types, output_hidden_states=True, **padded)
        hidden = ours(tokens, types, padded.get("attention_mask"))
    there = padded.get("attention_mask", torch.ones(3, 9, dtype=torch.bool))
    torch.testing.assert_close(hidden[there], wanted.hidden_states[-1][there], rtol=0, atol=1e-9)
    scores = wanted.prediction_logits.log_softmax(-1)
    torch.testing.assert_close(ours.log_probabilities(hidden)[there], scores[there], **EXACT)
    torch.testing.assert_close(ours.follows(hidden), wanted.seq_relationship_logits, **EXACT)


def test_names_of_older_files_and_options_without_a_configuration():
    model = small(MaskedLanguageModel, dim=128, norm="post", mixing="softmax", next_sentence=True)
    theirs = {"embeddings.LayerNorm.gamma": "encoder.embedding_norm.weight"}
    theirs["embeddings.LayerNorm.beta"] = "encoder.embedding_norm.bias"
    assert list(renamed(dict.fromkeys(theirs, torch.ones(1)))) == list(theirs.values())
    found = options_of(model.state_dict(), {})
    assert (found["heads"], found["layers"], found["norm_eps"]) == (2, 2, 1e-12)
    assert MaskedLanguageModel(**found).state_dict().keys() == model.state_dict().keys()


def test_published_weights_of_one_type_are_refused():
    model = small(MaskedLanguageModel, types=1, mixing="softmax", norm="post")
    with pytest.raises(ValueError, match="type_vocab_size=1; expected 2"):
        options_of(model.state_dict(), {})


def test_only_gaps_are_scored(monkeypatch):
    model = small(MaskedLanguageModel, mixing="softmax")
    tokens, targets = ids(4, LENGTH), torch.full((4, LENGTH), -1)
    targets[0, 3], targets[2, 1], targets[2, 9] = 5, 0, 28
    hidden = model(tokens)
    every = model.log_probabilities(hidden)
    wanted = torch.stack([every[0, 3, 5], every[2, 1, 0], every[2, 9, 28]])
    for at_once in (1000, 2):
        monkeypatch.setattr("molflt.sequence.heads._AT_ONCE", at_once * VOCABULARY)
        score = model.log_likelihood(model(tokens), targets)
        torch.testing.assert_close(score, wanted, **EXACT)
        mine, exact = (
            torch.autograd.grad(x.sum(), list(model.parameters()), retain_graph=True)
            for x in (score, wanted)
        )
        torch.testing.assert_close(mine, exact, **EXACT)


HYBRID = {"mixer": "fourier", "attention_layers": 1, "mixing": "softmax"}
NPRF = {"num_features": 8, "normalize_qk": True, "position": "toeplitz"}


@pytest.mark.parametrize("options", [HYBRID, NPRF, {"mixer": "dense"}], ids=str)
@pytest.mark.parametrize("pool", ["token", "mean"])
def test_classes_do_not_depend_on_padding(pool, options):
    model = small(SequenceClassifier, classes=3, pool=pool, **options)
    tokens, mask = ids(2, 8), torch.ones(2, 8, dtype=torch.bool)
    mask[0, 5:] = False
    padded = model(tokens, key_mask=mask)
    torch.testing.assert_close(padded[:1], model(tokens[:1, :5]), **EXACT)
    full = torch.ones(1, 8, dtype=torch.bool)
    torch.testing.assert_close(model(tokens[1:]), model(tokens[1:], key_mask=full), **EXACT)
    assert (padded[0] - model(tokens)[0]).abs().max() > 1e-4


CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "pixels"
CONFIGURED = ("softmax", "prf", "nprf", "nprf-rpe", "flt", "flt-3d")
SIDE, CHANNELS = 3, 3


def tiny(channels: int = CHANNELS, **options: Any) -> PixelModel:
    """Builds a small float64 model whose mask has a visible effect."""
    torch.manual_seed(0)
    small = {"dim": 16, "heads": 2, "layers": 2, "ffn_dim": 16, "num_features": 8}
    if options.get("mixing") == "softmax":
        del small["num_features"]
    model = PixelModel(channels, SIDE, **{**options, **small}).double().eval()
    with torch.no_grad():
        for name, parameter in model.stack.named_parameters():
            if name.startswith("position.") and name.endswith(("amplitude", "table")):
                parameter.normal_()
    return model


def images(batch: int = 2, channels: int = CHANNELS) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(256, (batch, channels, SIDE, SIDE), generator=draw, dtype=torch.uint8)


@pytest.mark.parametrize("mechanism", CONFIGURED)
def test_step_by_step_is_the_whole_and_no_byte_sees_itself(mechanism) -> None:
    model = tiny(**yaml.safe_load((CONFIGS / f"{mechanism}.yaml").read_text())["model"])
    values = model.bytes_of(images())
    given = torch.cat((torch.zeros_like(values[:, :1]), values[:, :-1]), dim=1)
    whole = model.log_probabilities(model(given))
    score = model.image_log_likelihood(images())
    torch.testing.assert_close(score, whole.gather(2, values[..., None])[..., 0], **EXACT)
    torch.testing.assert_close(whole.exp().sum(-1), torch.ones_like(score), **EXACT)
    assert whole.shape[-1] == 256
    other = images()
    other[:, 2, 1, 2] ^= 255  # blue of row 1, column 2: byte (1 * 3 + 2) * 3 + 2
    changed = model.image_log_likelihood(other) != score
    assert changed[:, 17:19].all() and not changed[:, :17].any()
    assert model.decodes == (mechanism != "nprf-rpe")
    if model.decodes:
        parts, state = [], None
        for piece in (given[:, :4], *given[:, 4:].split(1, dim=1)):
            out, state = model.decode(piece, state)
            parts.append(out)
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, **EXACT)


def test_images_survive_as_bytes_in_the_order_of_the_paper() -> None:
    model, given = tiny(), images()
    values = model.bytes_of(given)
    assert values[0, :4].tolist() == [*given[0, :, 0, 0].tolist(), int(given[0, 0, 0, 1])]
    assert torch.equal(model.images_of(values), given)
    gray = tiny(1)
    assert torch.equal(gray.bytes_of(images(1, 1)), images(1, 1).flatten(1).long())


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_places_of_large_images_in_half_precision(scale) -> None:
    """Places are (row, column, channel) in units of `position_scale`."""
    options = {"dim": 8, "heads": 1, "layers": 1, "absolute": "none", "position_scale": scale}
    where = {"position": "multiplicative", "position_options": {"dim": 3}}
    found = PixelModel(3, 258, **options, **where).bfloat16()._positions(torch.arange(3 * 258**2))
    expected = np.stack(np.unravel_index(np.arange(3 * 258**2), (258, 258, 3)), axis=-1)
    assert torch.equal(found[0].double(), scale * torch.from_numpy(expected))
