"""Conversion of published BERT and FNet weights from the tensor names of `transformers`."""

import re
from collections.abc import Mapping

from torch import Tensor

_WORDS = "embeddings.word_embeddings.weight"
_BLOCK = (
    (r"attention\.self\.(query|key|value)", r"attention.to_\2"),
    (r"attention\.output\.dense", "attention.to_out"),
    (r"(?:attention|fourier)\.output\.LayerNorm", "attention_norm"),
    (r"intermediate\.dense", "ffn.0"),
    (r"output\.dense", "ffn.3"),
    (r"output\.LayerNorm", "ffn_norm"),
)
_ENCODER = (
    (r"embeddings\.word_embeddings", "words"),
    (r"embeddings\.position_embeddings", "places"),
    (r"embeddings\.token_type_embeddings", "types"),
    (r"embeddings\.LayerNorm", "embedding_norm"),
    (r"embeddings\.projection", "projection"),
    *((rf"encoder\.layer\.(\d+)\.{theirs}", rf"stack.blocks.\1.{ours}") for theirs, ours in _BLOCK),
)
_RENAMED = (
    *((rf"(?:(?:bert|fnet)\.)?{theirs}", f"encoder.{ours}") for theirs, ours in _ENCODER),
    (r"(?:(?:bert|fnet)\.)?pooler\.dense", "pooler"),
    (r"cls\.predictions\.transform\.dense", "head.dense"),
    (r"cls\.predictions\.transform\.LayerNorm", "head.norm"),
    (r"cls\.predictions", "head"),  # only the bias; the weights of the decoder are the embeddings
    (r"cls\.seq_relationship", "next_sentence"),
    (r"classifier", "classify"),
)
_PATTERNS = [(re.compile(rf"{theirs}\.(\w+)"), ours) for theirs, ours in _RENAMED]
_UNUSED = re.compile(r".*position_ids|cls\.predictions\.decoder\..*")  # indices; tied weights
_TENSORS = {"gamma": "weight", "beta": "bias"}  # LayerNorm in files converted from TensorFlow
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_SUPPORTED = {
    "model_type": ("bert", "fnet"),  # RoBERTa has the same names but other positions
    "hidden_act": tuple(_ACTIVATIONS),
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "tie_word_embeddings": (True,),
}
_HEAD = 64  # width of a head, in all published sizes


def is_transformers(weights: Mapping[str, object]) -> bool:
    """Returns True if tensors are named as in the BERT or FNet models of `transformers`."""
    return any(f"{prefix}{_WORDS}" in weights for prefix in ("", "bert.", "fnet."))


def renamed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames tensors to the names used in this package; keeps unknown names.

    The result fits a `molflt.sequence.MaskedLanguageModel` or `SequenceClassifier` that is built
    with `options_of`. Tensors are not copied.
    """
    return {_rename(name): x for name, x in weights.items() if not _UNUSED.fullmatch(name)}


def _rename(name: str) -> str:
    for pattern, ours in _PATTERNS:
        if (match := pattern.fullmatch(name)) is not None:
            return f"{match.expand(ours)}.{_TENSORS.get(match.groups()[-1], match.groups()[-1])}"
    return name


def options_of(weights: Mapping[str, Tensor], config: Mapping[str, object]) -> dict[str, object]:
    """Returns the options of the model to which renamed weights belong.

    Args:
        weights: result of `renamed`.
        config: content of the config.json from `transformers`. Missing entries are derived from the
            shapes of the weights, with heads of width 64, or set to the values in the papers.
    """
    vocabulary, dim = weights["encoder.words.weight"].shape
    layers = sum(name.endswith(".ffn.0.weight") for name in weights)
    attends = any(name.endswith(".to_query.weight") for name in weights)
    activation = str(config.get("hidden_act", "gelu" if attends else "gelu_new"))
    for name, values in _SUPPORTED.items():
        if (value := config.get(name, values[0])) not in values:
            raise ValueError(f"{name}={value!r}; expected {' or '.join(map(str, values))}")
    if (types := len(weights["encoder.types.weight"])) < 2:
        raise ValueError(f"type_vocab_size={types}; expected 2 or more, for pairs of sentences")
    options: dict[str, object] = {
        "vocabulary": vocabulary,
        "dim": dim,
        "heads": config.get("num_attention_heads", max(1, dim // _HEAD)),
        "layers": layers,
        "ffn_dim": len(weights["encoder.stack.blocks.0.ffn.0.weight"]),
        "types": types,
        "max_length": len(weights["encoder.places.weight"]),
        "absolute": "learned",
        "norm": "post",
        "norm_eps": config.get("layer_norm_eps", 1e-12),
        "activation": _ACTIVATIONS[activation],
        "embedding_dropout": config.get("hidden_dropout_prob", 0.1),
        "dropout": config.get("hidden_dropout_prob", 0.1),
        "project_embeddings": "encoder.projection.weight" in weights,
        "next_sentence": "next_sentence.weight" in weights,
    }
    if not attends:
        return {**options, "mixer": "fourier"}
    dropout = config.get("attention_probs_dropout_prob", 0.1)
    return {**options, "mixing": "softmax", "attention_dropout": dropout}
