"""Layers of a stack that mix tokens without attention."""

from collections.abc import Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal

from molflt.attention.checks import known_names, no_effect, one_of
from molflt.attention.fnet import TOKEN_MIXERS, Mixer
from molflt.attention.layer import Attention

ATTENTION = "attention"
MIXER_OPTIONS = ("mixer", "mixer_options", "attention_layers")
"""Options of a stack that do not apply to unordered or causal tokens."""

# The command line lists the choices of an option from its type.
if TYPE_CHECKING:
    MixerName = str
else:
    MixerName = Literal[(ATTENTION, *TOKEN_MIXERS)]


def make_mixer(name: str, dim: int, options: Mapping[str, Any]) -> Mixer:
    """A mixer of `TOKEN_MIXERS`, of tokens of width `dim`."""
    make = TOKEN_MIXERS[name]
    known_names(make, options, but=("dim",))
    if make.bounded and "max_tokens" not in options:
        raise ValueError(
            f"mixer={name!r} has a matrix of all tokens; expected mixer_options max_tokens, the "
            "longest sequence; got none; set it"
        )
    return make(dim, **options)


def mixed_layers(
    layers: int,
    mixer: str,
    mixer_options: Mapping[str, object] | None,
    attention_layers: int | None,
    attention: Mapping[str, object],
) -> int:
    """Returns the number of layers, counted from the first, with the mixer instead of attention.

    Args:
        layers: of the stack.
        mixer: its option, as are the next two.
        mixer_options: see there.
        attention_layers: see there.
        attention: options of attention.
    """
    one_of("mixer", mixer, (ATTENTION, *TOKEN_MIXERS))
    if mixer == ATTENTION:
        why = f"with mixer={ATTENTION!r}"
        no_effect(why, mixer_options=mixer_options, attention_layers=attention_layers)
        return 0
    last = attention_layers or 0
    if not 0 <= last < layers:
        raise ValueError(
            f"attention_layers must be 0 to {layers - 1}, fewer than layers={layers}; got {last}; "
            f"use mixer={ATTENTION!r} for all of them"
        )
    if attention.get("causal"):
        raise ValueError(
            f"mixer={mixer!r} sees all tokens; expected causal=False; got True; use "
            f"mixer={ATTENTION!r}"
        )
    if not last:
        defaults = signature(Attention).parameters
        named = {"dropout": "attention_dropout"}  # of the stack
        idle = {
            named.get(name, name): value
            for name, value in attention.items()
            if value != defaults[name].default
        }
        no_effect(f"with mixer={mixer!r} and no attention_layers", **idle)
    return layers - last
