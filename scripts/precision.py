"""Error of half precision against float64, at queries and keys of standard deviation 1 and 3.

    python scripts/precision.py

One attention layer's sums under autocast, as `Attention` computes them: queries, keys and values
arrive in half precision, features and sums are float32. Prints a Markdown table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from molflt.attention import FEATURE_MAPS, causal, linear, softmax

HEADS, DIM, TOKENS, FEATURES = 8, 64, 1024, 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAPS = ("positive", "elu", "relu")


def outputs(name: str, query: Tensor, key: Tensor, value: Tensor, seed: int) -> dict[str, Tensor]:
    """Attention outputs by form, from inputs as they are; features in float32 at least."""
    torch.manual_seed(seed)
    phi = FEATURE_MAPS[name](DIM, HEADS, FEATURES)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    phi = phi.to(wide)
    phi_q, phi_k = phi(query.to(wide)), phi(key.to(wide))
    return {
        f"linear, {name}": linear(phi_q, phi_k, value).ratio(),
        f"causal, {name}": causal(phi_q, phi_k, value)[0].ratio(),
    }


def measured(deviation: float, dtype: torch.dtype, seed: int = 0) -> dict[str, float]:
    """Relative error of the outputs (Frobenius norm) by form.

    Raises:
        ValueError: if an output is not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (1, HEADS, TOKENS, DIM)
    exact = [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in "qkv"]
    scale = deviation * DIM**-0.25
    exact = [exact[0] * scale, exact[1] * scale, exact[2]]
    low = [x.to(dtype) for x in exact]
    errors = {}
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        got = {k: v for name in MAPS for k, v in outputs(name, *low, seed=seed).items()}
        got["softmax"] = softmax(*low)
    expected = {k: v for name in MAPS for k, v in outputs(name, *exact, seed=seed).items()}
    expected["softmax"] = softmax(*exact)
    for form, out in got.items():
        if not torch.isfinite(out).all():
            raise ValueError(f"{form}, {dtype}, standard deviation {deviation}: not finite")
        errors[form] = ((out.double() - expected[form]).norm() / expected[form].norm()).item()
    return errors


def main() -> None:
    """Prints the table."""
    columns = [(deviation, name) for deviation in (1.0, 3.0) for name in DTYPES]
    found = {c: measured(c[0], DTYPES[c[1]]) for c in columns}
    head = ["form", *(f"{name}, sd {deviation:g}" for deviation, name in columns)]
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for form in found[columns[0]]:
        print(f"| {form} | " + " | ".join(f"{found[c][form]:.1e}" for c in columns) + " |")


if __name__ == "__main__":
    main()
