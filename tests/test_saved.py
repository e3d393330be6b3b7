"""Weights saved by an early version (commit 2c6330c) still give the same numbers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from molflt import GraphAttention, Stack

SAVED = safe_open(Path(__file__).parent / "saved" / "version-0.1.safetensors", "pt")
OPTIONS = {name: json.loads(text) for name, text in sorted(SAVED.metadata().items())}
del OPTIONS["graph-images-6.0"]  # images then had a sharp cutoff


def of(name: str) -> dict[str, torch.Tensor]:
    own = [key for key in SAVED.keys() if key.startswith(f"{name}/")]  # noqa: SIM118
    return {key.removeprefix(f"{name}/"): SAVED.get_tensor(key) for key in own}


@pytest.mark.parametrize("name", OPTIONS)
def test_same_weights_same_numbers(name: str) -> None:
    saved, atoms, keys = of(name), of("atoms"), {}
    if name.startswith("graph"):
        layer = GraphAttention(16, 2, **OPTIONS[name]).double()
        inputs = [atoms[key] for key in ("x", "pos", "batch", "cell", "pbc")]
    else:
        layer = Stack(16, 2, 2, ffn_dim=24, refinements=2, **OPTIONS[name]).double().eval()
        inputs = [saved["x"], saved["r"]]
        keys = {"key_mask": saved["mask"]}
    layer.load_state_dict(of(f"{name}/weights"))
    torch.testing.assert_close(layer(*inputs, **keys), saved["out"], rtol=0.0, atol=1e-12)
