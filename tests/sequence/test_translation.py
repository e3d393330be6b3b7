import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from contract import EXACT, copy_attention, count_numbers
from torch import nn

from molflt.sequence.encoder_decoder import EncoderDecoder
from molflt.sequence.generation import beam_search

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "translation"
SIZES = ("iwslt14", "multi30k")
MECHANISMS = sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem not in SIZES)
VOCABULARY, BEGIN, END = 23, 2, 3
WITH_STATE = [name for name in MECHANISMS if "rpe" not in name]


def tiny(mechanism: str, vocabulary: int = VOCABULARY, **changes: Any) -> EncoderDecoder:
    """Builds a small model with a configured mechanism and clearly different logits."""
    torch.manual_seed(0)
    given = yaml.safe_load((CONFIGS / f"{mechanism}.yaml").read_text())["model"]
    small = {"dim": 16, "heads": 2, "layers": 2, "ffn_dim": 24, "max_length": 40}
    model = EncoderDecoder(vocabulary, **{**given, **small, **changes}).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("amplitude", "table")):
                parameter.normal_()
            elif parameter.ndim == 2 and name != "head.weight":
                parameter.mul_(4)
    return model


def ids(batch: int, length: int, seed: int = 0, vocabulary: int = VOCABULARY) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(5 if vocabulary > 5 else 0, vocabulary, (batch, length), generator=draw)


def sources() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns three sentences of 7, 4 and 1 tokens."""
    mask = torch.arange(7) < torch.tensor([7, 4, 1])[:, None]
    return ids(3, 7).masked_fill(~mask, 0), mask


# --- independent implementations ----------------------------------------------------------------


MARIAN_NAMES = (
    (r".*(shared|embed_tokens|lm_head)\.", "head."),
    (r"model\.decoder\.layers\.(\d)\.encoder_attn_layer_norm", r"decoder.cross_norms.\1"),
    (r"model\.decoder\.layers\.(\d)\.encoder_attn", r"decoder.cross.\1"),
    (r"model\.encoder\.layers", "encoder.blocks"),
    (r"model\.decoder\.layers", "decoder.stack.blocks"),
    (r"self_attn_layer_norm", "attention_norm"),
    (r"final_layer_norm", "ffn_norm"),
    (r"self_attn", "attention"),
    (r"\b([qkv])_proj", lambda found: "to_" + {"q": "query", "k": "key", "v": "value"}[found[1]]),
    (r"out_proj", "to_out"),
    (r"fc1", "ffn.0"),
    (r"fc2", "ffn.3"),
)


def marian(ours: EncoderDecoder) -> nn.Module:
    """Copies the weights of a softmax model with post-norm into MarianMT of `transformers`."""
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 16, "max_position_embeddings": 60, "vocab_size": ours.vocabulary}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 24}
    ends = {"pad_token_id": 0, "eos_token_id": END, "decoder_start_token_id": BEGIN}
    config = transformers.MarianConfig(
        **sizes, **ends, dropout=0.0, scale_embedding=True, activation_function="gelu"
    )
    config.forced_eos_token_id = None
    theirs = transformers.MarianMTModel(config).double().eval()
    own = ours.state_dict()
    weights = {}
    for name in theirs.state_dict():
        renamed = name
        for pattern, replacement in MARIAN_NAMES:
            renamed = re.sub(pattern, replacement, renamed)
        if renamed in own:
            weights[name] = own[renamed]
    left = theirs.load_state_dict(weights, strict=False)
    assert all("embed_positions" in n or "final_logits" in n for n in left.missing_keys)
    return theirs


def test_softmax_is_marian_in_every_logit():
    ours = tiny("softmax", norm="post")
    source, mask = sources()
    target = ids(3, 6, seed=1)
    theirs = marian(ours)
    with torch.no_grad():
        wanted = theirs(source, mask.long(), decoder_input_ids=target).logits.log_softmax(-1)
        found = ours.log_probabilities(ours(source, target, mask))
    assert wanted.std() > 0.5
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-6)  # their positions are float32


@pytest.mark.parametrize(("beam", "penalty"), [(1, 1.0), (4, 0.0), (4, 1.2)])
def test_beam_search_equals_transformers(beam, penalty):
    """Targets end before the limit; `transformers` scores longer targets differently."""
    lengths = []
    for seed in (3, 4):
        ours = tiny("softmax", vocabulary=8, norm="post")
        torch.manual_seed(seed)
        source = torch.randint(4, 8, (8, 7))
        with torch.no_grad():
            ours.head.weight.normal_(std=0.25)
            ours.head.weight[END] *= 3
        wanted = marian(ours).generate(
            source,
            num_beams=beam,
            length_penalty=penalty,
            early_stopping=beam > 1,
            do_sample=False,
            max_new_tokens=20,
        )
        ends = {"begin": BEGIN, "end": END, "limit": 20}
        found = beam_search(ours, source, beam=beam, length_penalty=penalty, **ends)
        for row, one in zip(wanted[:, 1:].tolist(), found, strict=True):
            if END in row:
                assert one.tokens == row[: row.index(END)]
                lengths.append(len(one.tokens))
    assert len(lengths) > 5 and len(set(lengths)) > 1


def test_pre_norm_is_that_of_torch():
    ours = tiny("softmax")
    layer = nn.TransformerDecoderLayer(
        16, 2, 24, 0.0, "gelu", batch_first=True, norm_first=True, dtype=torch.float64
    )
    theirs = nn.TransformerDecoder(layer, 2, nn.LayerNorm(16, dtype=torch.float64)).eval()
    stack, decoder = ours.decoder.stack, ours.decoder
    with torch.no_grad():
        for i, layer in enumerate(theirs.layers):
            block = stack.blocks[i]
            copy_attention(layer.self_attn, block.attention)
            copy_attention(layer.multihead_attn, decoder.cross[i])
            norms = block.attention_norm, decoder.cross_norms[i], block.ffn_norm
            for norm, own in zip((layer.norm1, layer.norm2, layer.norm3), norms, strict=True):
                nn.init.normal_(own.weight)
                norm.load_state_dict(own.state_dict())
            layer.linear1.load_state_dict(block.ffn[0].state_dict())
            layer.linear2.load_state_dict(block.ffn[3].state_dict())
        x, context = torch.randn(2, 6, 16).double(), torch.randn(2, 5, 16).double()
        mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
        past = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
        wanted = theirs(x, context, past, memory_key_padding_mask=~mask)
        torch.testing.assert_close(decoder(x, context, None, mask), wanted, **EXACT)


def test_smoothed_labels_are_those_of_torch():
    model = tiny("prf")
    hidden = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    targets = ids(2, 5).index_fill(1, torch.tensor([4]), -1)
    plain, smoothed = model.log_likelihood(hidden, targets, 0.1)
    assert torch.equal(model.log_likelihood(hidden, targets.short(), 0.1)[1], smoothed)
    flat = targets.flatten()
    logits = hidden.flatten(0, 1) @ model.head.weight.T
    for found, share in ((plain, 0.0), (smoothed, 0.1)):
        wanted = nn.functional.cross_entropy(
            logits, flat, ignore_index=-1, label_smoothing=share, reduction="sum"
        )
        torch.testing.assert_close(-found.sum(), wanted, **EXACT)
        grads = [
            torch.autograd.grad(value, (hidden, model.head.weight), retain_graph=True)
            for value in (-found.sum(), wanted)
        ]
        torch.testing.assert_close(*grads, **EXACT)


# --- decoding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", WITH_STATE)
def test_steps_equal_the_whole_pass(mechanism):
    """Decodes token by token and in pieces; only the state of softmax grows."""
    model = tiny(mechanism)
    source, mask = sources()
    target = ids(3, 9, seed=2)
    whole = model(source, target, mask)
    for pieces in ([1] * 9, [4, 5]):
        state, parts, sizes = model.begin(model.encode(source, mask), mask), [], []
        for part in target.split(pieces, dim=1):
            hidden, state = model.advance(part, state)
            parts.append(hidden)
            sizes.append(count_numbers(state.decoder.stack.blocks))
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, **EXACT)
        growing = model.decoder.stack.mixings == ["softmax"]
        assert (sizes[-1] > sizes[0]) == growing and (growing or len(set(sizes)) == 1)
    longer = model.begin(model.encode(torch.cat((source, source), dim=1)))
    same = [
        count_numbers(a) == count_numbers(b)
        for a, b in zip(longer.decoder.memory, state.decoder.memory, strict=True)
    ]
    assert all(same) != growing


@pytest.mark.parametrize("mechanism", ["softmax", "prf", "flt", "nprf-rpe"])
def test_a_beam_of_a_batch_is_that_of_each_source(mechanism):
    model = tiny(mechanism)
    source, mask = sources()
    ends = {"begin": BEGIN, "end": END, "beam": 3, "length_penalty": 1.2}
    for row, one in enumerate(beam_search(model, source, mask, **ends)):
        (alone,) = beam_search(model, source[row : row + 1, mask[row]], **ends)
        assert alone.tokens == one.tokens and alone.score == pytest.approx(one.score, abs=1e-10)
        assert len(one.tokens) < 2 * int(mask[row].sum()) + 10
        target = torch.tensor([[BEGIN, *one.tokens, END]])
        hidden = model(source[row : row + 1, mask[row]], target[:, :-1])
        log_p = model.log_probabilities(hidden).gather(2, target[:, 1:, None])
        assert one.score == pytest.approx(float(log_p.sum()) / log_p.shape[1] ** 1.2, abs=1e-10)


def test_sources_without_tokens_have_targets():
    none = torch.zeros(2, 0, dtype=torch.long)
    found = beam_search(tiny("prf"), none, begin=BEGIN, end=END, limit=4)
    assert [len(one.tokens) <= 3 for one in found] == [True, True]


def test_normalizers_without_positions_are_those_of_attention_to_the_source():
    plain, other = tiny("flt"), tiny("flt", normalize="unmasked")
    source, mask = sources()
    target = ids(3, 4, seed=2)
    assert {block.attention.normalize for block in other.decoder.stack.blocks} == {"unmasked"}
    assert {cross.normalize for cross in other.decoder.cross} == {"masked"}
    whole = other(source, target, mask)
    assert (whole - plain(source, target, mask)).abs().max() > 1e-6
    steps, _ = other.advance(target, other.begin(other.encode(source, mask), mask))
    torch.testing.assert_close(steps, whole, **EXACT)


# --- invariances --------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_padding_and_neighbors_are_nothing_to_a_sentence(mechanism):
    model = tiny(mechanism)
    source, mask = sources()
    target = ids(3, 5, seed=3)
    whole = model(source, target, mask)
    garbage = source.masked_fill(~mask, 9)
    torch.testing.assert_close(model(garbage, target, mask), whole, **EXACT)
    for row in range(3):
        alone = model(source[row : row + 1, mask[row]], target[row : row + 1])
        torch.testing.assert_close(alone[0], whole[row], **EXACT)
    encoded = model.encode(source, mask).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(
        model.decode(target, encoded, mask)[1].square().sum(), encoded
    )
    assert (gradient[[0, 2]] == 0).all() and (gradient[1, 4:] == 0).all()
    assert (gradient[1, :4] != 0).any(dim=1).all()
    later = target.clone()
    later[:, 3:] = 7
    torch.testing.assert_close(model(source, later, mask)[:, :3], whole[:, :3], **EXACT)
