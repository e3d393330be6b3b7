"""Error of half precision against float64, at queries and keys of standard deviation 1 and 3."""

import math

import torch
from kit.rows import Rows, markdown, names, pick
from torch import Tensor

from molflt.attention import FEATURE_MAPS
from molflt.attention.mixing.causal import causal_linear
from molflt.attention.mixing.forms import linear, softmax

HEADS, DIM, FEATURES = 8, 64, 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAPS = ("positive", "elu", "relu")
QUICK = {"tokens": 64}


def outputs(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Tensor]:
    """Attention outputs by form; features are computed in float32 or float64."""
    found = {"softmax": softmax(query, key, value)}
    for name in MAPS:
        torch.manual_seed(0)
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        options = {} if name == "elu" else {"num_features": FEATURES}
        phi = FEATURE_MAPS[name](DIM, HEADS, **options).to(wide)
        phi_q, phi_k = phi(query.to(wide)), phi(key.to(wide))
        found[f"linear, {name}"] = linear(phi_q, phi_k, value).ratio()
        found[f"causal, {name}"] = causal_linear(phi_q, phi_k, value)[0].ratio()
    return found


@torch.no_grad()
def measure(deviations: tuple[float, ...] = (1.0, 3.0), tokens: int = 1024) -> Rows:
    """Errors of all forms and dtypes."""
    rows = []
    for deviation in deviations:
        generator = torch.Generator().manual_seed(0)
        shape = (3, 1, HEADS, tokens, DIM)
        query, key, value = torch.randn(shape, dtype=torch.float64, generator=generator)
        exact = [query * deviation * DIM**-0.25, key * deviation * DIM**-0.25, value]
        expected = outputs(*exact)
        for name, dtype in DTYPES.items():
            with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                got = outputs(*(x.to(dtype) for x in exact))
            for form, out in got.items():
                error = ((out.double() - expected[form]).norm() / expected[form].norm()).item()
                error = error if torch.isfinite(out).all() else math.inf
                rows.append({"form": form, "sd": deviation, "dtype": name, "error": error})
    return rows


def table(rows: Rows) -> str:
    """Markdown: a line per form."""
    head = ["form", *(f"{r['dtype']}, sd {r['sd']:g}" for r in pick(rows, form="softmax"))]
    forms = names(rows, "form")
    lines = [[form, *(f"{row['error']:.1e}" for row in pick(rows, form=form))] for form in forms]
    return markdown(head, lines)
