"""The README's table of mechanisms, made from the dictionaries of the attention core.

    python scripts/mechanisms.py             # print it
    python scripts/mechanisms.py --write     # put it into README.md

What a mechanism can do is read from its class; papers, costs and oracles are written here, one line
for each key, and a test fails when a key has no line or an oracle no test.
"""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import NamedTuple

from molflt.attention import (
    FEATURE_MAPS,
    MIXINGS,
    NODES,
    POSITIONS,
    PROJECTIONS,
    SPECTRA,
    TOKEN_MIXERS,
)

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- mechanisms: scripts/mechanisms.py --write -->", "<!-- end of mechanisms -->"

FAVOR, PERFORMER, NPRF = "2006.03555", "2009.14794", "2106.12566"
FLT, FNET = "2302.01925", "2105.03824"


class Line(NamedTuple):
    """What cannot be read from a class."""

    paper: str
    """arXiv number"""
    where: str
    """equation or section"""
    cost: str
    oracle: str
    """what it is compared with"""
    test: str
    """file below tests/attention and test, without their prefixes test_"""


_GENERALIZED = Line(
    FAVOR, "sec. 2.2, 4.3", "N m d", "performer-pytorch", "feature_maps::generalized_features"
)
_SIGNED = _GENERALIZED._replace(oracle="quadratic form", test="contract::fast_equals_quadratic")

LINES: dict[str, dict[str, Line]] = {
    "feature_map": {
        "positive": Line(
            PERFORMER, "lemma 1", "N m d", "performer-pytorch", "feature_maps::positive_features"
        ),
        "trigonometric": Line(
            NPRF, "eq. 4", "N m d", "exp(x.y), unbiased", "feature_maps::features_of_the_softmax"
        ),
        "favor2020": Line(
            FAVOR, "eqs. 5-12", "N m d", "formula; exp(x.y)", "feature_maps::favor2020_is"
        ),
        "relu": _GENERALIZED._replace(oracle="performer-pytorch, PyG"),
        "squared_relu": _GENERALIZED,
        "sigmoid": _GENERALIZED,
        "abs": _GENERALIZED,
        "exp": _SIGNED,
        "gelu": _SIGNED,
        "cos": _SIGNED,
        "tanh": _SIGNED,
        "identity": _SIGNED,
        "learnable_exp": _SIGNED._replace(paper=FLT, where="app. B.2"),
        "learnable_relu": _SIGNED._replace(paper=FLT, where="app. B.2"),
        "elu": Line(
            "2006.16236", "eq. 7", "N d²", "performer-pytorch", "feature_maps::generalized_features"
        ),
        "cosformer": Line(
            "2202.08791", "eq. 7", "N d²", "authors' formula", "rotations::cosine_attention_equals"
        ),
        "rfa_gaussian": Line(
            "2103.02143", "sec. 3.1", "N m d", "Gaussian kernel", "feature_maps::rfa_features"
        ),
        "rfa_arccos": Line(
            "2103.02143", "sec. 3.1", "N m d", "arc-cosine kernel", "feature_maps::rfa_features"
        ),
    },
    "projection": {
        "iid": Line(FAVOR, "sec. 2.3", "m d", "moments", "projections::rows_have_mean_0"),
        "orthogonal": Line(
            FAVOR, "sec. 2.4", "m d", "moments; kernel", "projections::the_kernel_is_unbiased"
        ),
        "hadamard": Line(
            FAVOR, "sec. 2.4", "m log d", "scipy's Hadamard", "projections::hadamard_equals"
        ),
        "givens": Line(FAVOR, "sec. 2.4", "m log d", "dense product", "projections::givens_equals"),
        "sphere": Line(
            NPRF, "sec. 4.5", "m d", "exact bias", "projections::the_bias_of_the_sphere"
        ),
        "sobol": Line(
            "1412.8293", "quasi-Monte Carlo", "m d", "kernel", "projections::the_kernel_is_unbiased"
        ),
    },
    "spectrum": {
        "gaussian_basis": Line(
            FLT, "OC20", "N m (d + 2r)", "Fourier integral", "spectra::mask_of_gaussians"
        ),
        "gaussian_mixture": Line(
            FLT, "eq. 6", "N m (d + 2r)", "Fourier integral", "spectra::mask_of_gaussians"
        ),
        "gaussian": Line(
            FLT, "eq. 7", "N m (d + 2r)", "Fourier integral", "spectra::mask_of_gaussians"
        ),
        "laplace": Line(
            FLT, "eq. 7", "N m (d + 2r)", "Fourier integral", "spectra::spectrum_of_box_like"
        ),
        "matern": Line(
            FLT, "eq. 7", "N m (d + 2r)", "radial transform", "spectra::matern_spectrum"
        ),
        "local": Line(
            FLT, "eqs. 8-11", "N m (d + 2r)", "Fourier integral", "spectra::spectrum_of_box_like"
        ),
        "smooth_local": Line(
            FLT, "eq. 12", "N m (d + 2r)", "scipy's B-splines", "spectra::smooth_local_is_scipys"
        ),
    },
    "nodes": {
        "gaussian": Line(
            FLT, "sec. 3, eqs. 4-5", "r", "density, 1/√r", "nodes::estimates_are_unbiased"
        ),
        "orthogonal": Line(
            FLT, "eq. 4, drawn otherwise", "r", "unbiased", "quadrature::structured_draws"
        ),
        "sobol": Line(
            FLT, "eq. 4, drawn otherwise", "r", "unbiased", "quadrature::structured_draws"
        ),
        "kernel": Line(FLT, "eq. 7", "r", "variance of theory", "nodes::kernel_nodes_have"),
        "shells": Line(
            FLT, "eq. 4 by quadrature", "(2R/s)^1.6 to 2", "exact mask", "quadrature::shells_are"
        ),
    },
    "position": {
        "kernel": Line(
            NPRF,
            "sec. 3.2, in any dimension",
            "N m r d",
            "quadratic form; Fourier integral",
            "contract::fast_equals_quadratic",
        ),
        "toeplitz": Line(
            NPRF, "sec. 3.2", "N log N m d", "scipy's matmul_toeplitz", "toeplitz::products_are"
        ),
        "bucketed": Line(
            "1910.10683", "sec. 2.1", "N log N m d", "transformers' T5", "grid::buckets_are_t5s"
        ),
        "low_rank": Line(
            FLT, "sec. 4.2", "N m (d + r)", "SVD; Toeplitz mask", "grid::error_is_near_the_best"
        ),
        "gaussian_bias": Line(
            "2203.04810", "3D encoding", "N² K", "formula", "gaussian_bias::bias_is_the_formula"
        ),
        "rotary": Line(
            "2104.09864",
            "eq. 34",
            "N d",
            "performer-pytorch, transformers",
            "rotations::rotary_equals_performer",
        ),
        "cosine": Line(
            "2202.08791",
            "re-weighting",
            "2 N d²",
            "authors' formula",
            "rotations::cosine_attention",
        ),
        "sine_spe": Line(
            "2105.08399", "sineSPE", "N d R", "kernel, exactly", "stochastic::orthogonal_noise"
        ),
        "conv_spe": Line(
            "2105.08399", "convSPE", "N d R P", "kernel, exactly", "stochastic::orthogonal_noise"
        ),
    },
    "mixing": {
        "linear": Line(
            PERFORMER,
            "eq. 4",
            "N m d",
            "performer-pytorch; quadratic",
            "mixing::causal_equals_performer",
        ),
        "quadratic": Line(PERFORMER, "eq. 4", "N² (m + d)", "is one", "contract::fast_equals"),
        "softmax": Line(FLT, "eq. 1", "N² d", "flex_attention", "mixing::softmax_with_a_bias"),
    },
    "token mixer": {
        "fourier": Line(FNET, "eq. 3", "N d log(N d)", "transformers, scipy", "fourier::layer_is"),
        "dense": Line(FNET, "sec. 4.1", "N² d + N d²", "two products", "fourier::two_matrices"),
        "random": Line(FNET, "sec. 4.1", "N² d + N d²", "two products", "fourier::two_matrices"),
        "none": Line(FNET, "sec. 4.1", "0", "residual sum", "fourier::no_mixing_leaves"),
    },
}
DICTIONARIES: dict[str, object] = {
    "feature_map": FEATURE_MAPS,
    "projection": PROJECTIONS,
    "spectrum": SPECTRA,
    "nodes": NODES,
    "position": {key: build for key, build in POSITIONS.items() if key != "spectral"},
    "mixing": dict.fromkeys(MIXINGS),
    "token mixer": TOKEN_MIXERS,
}
COLUMNS = ("causal", "cross", "ragged", "decode state", "periodic")


def abilities(kind: str, key: str) -> tuple[str, ...]:
    """Causal, cross, ragged, decode state, periodic images: yes, or nothing."""
    if kind == "token mixer":
        can = (False, False, True, False, False)
    elif kind == "mixing":
        can = (True, True, True, key != "quadratic", True)
    elif kind == "position":
        build = POSITIONS[key]
        cls = build if inspect.isclass(build) else build.__self__
        linear = "linear" in cls.mixings
        periodic = "dim" in inspect.signature(build).parameters
        can = (cls.causal, True, True, cls.decodes and linear, periodic)
    elif kind in ("spectrum", "nodes"):
        can = (True, True, True, True, True)
    else:  # maps and projections work token by token
        can = (True, True, True, True, True)
    return tuple("yes" if each else "" for each in can)


def table() -> str:
    """The table in Markdown."""
    head = ("option", "value", "paper", "cost", *COLUMNS, "oracle")
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for kind, lines in LINES.items():
        for key, line in lines.items():
            paper = f"[{line.paper}](https://arxiv.org/abs/{line.paper}), {line.where}"
            file, _, _ = line.test.partition("::")
            oracle = f"[{line.oracle}](tests/attention/test_{file}.py)"
            cells = (kind, f"`{key}`", paper, line.cost, *abilities(kind, key), oracle)
            rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def written(text: str) -> str:
    """A page with the table between its two marks.

    Raises:
        ValueError: if the marks are missing.
    """
    if BEGIN not in text or END not in text:
        raise ValueError(f"{README}: the marks {BEGIN!r} and {END!r} are missing; put them back")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Prints the table or writes it into the README."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into README.md")
    if parser.parse_args().write:
        README.write_text(written(README.read_text()))
    else:
        print(table())


if __name__ == "__main__":
    main()
