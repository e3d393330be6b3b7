"""The spectral mask and the positional kernel from names, as in a configuration."""

import io

import pytest
import torch
from families import EXACT, randn

from molflt.attention.nodes import NODES
from molflt.attention.positions import make_position

SHELLS = {"node_diameter": 5.0, "node_k_max": 0.3, "node_num_shells": 4}


@pytest.mark.parametrize("name", ["spectral", "kernel"])
@pytest.mark.parametrize(
    "options",
    [
        *({"nodes": rule} for rule in ("gaussian", "orthogonal", "sobol")),
        {"nodes": "shells", **SHELLS},
        {"spectrum": "shell_weights", **SHELLS},
        {"spectrum": "matern", "nodes": "shells", **SHELLS},
        {"spectrum": "matern"},
    ],
)
def test_parts_by_name_survive_saving(name, options):
    x = randn(2, 7, 3)
    positions = [make_position(name, 4, 8, **options).double() for _ in range(2)]
    file = io.BytesIO()
    torch.save(positions[0].state_dict(), file)
    file.seek(0)
    positions[1].load_state_dict(torch.load(file))
    products = [left @ right.mT for left, right in (p.factors(x, x) for p in positions)]
    assert products[0].shape == (2, 4, 7, 7)
    torch.testing.assert_close(*products, **EXACT)
    expected = {"shell_weights": "ShellNodes", "matern": "KernelNodes"}
    rule = options.get("nodes") and NODES[options["nodes"]].__name__
    assert type(positions[0].nodes).__name__ == (rule or expected[options["spectrum"]])


def test_weighted_shells_compile_and_run_in_single_precision():
    position = make_position("spectral", 2, 8, spectrum="shell_weights", **SHELLS).float()
    x = randn(1, 5, 3).float()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: position.factors(x, x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), position.factors(x, x))
    assert compiled(x)[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nodes": "lebedev"}, "nodes='lebedev' is unknown; expected one of gaussian, orthogonal"),
        ({"spectrum": "bessel"}, "spectrum='bessel' is unknown; .* shell_weights"),
        ({"nodes": "shells", "node_k_max": 1.0}, "ShellNodes needs .* got no node_diameter"),
        ({"node_k_max": 1.0}, "GaussianNodes has no option node_k_max; expected .*node_sigma"),
        ({"nodes": "shells", "node_normalized": True}, "has no option node_normalized"),
        ({"width": 1.0}, "GaussianBasis has no option width; expected some of num_gaussians"),
        ({"nodes": "kernel"}, "'gaussian_basis' cannot be sampled at nodes='kernel'"),
        (
            {"spectrum": "shell_weights", "nodes": "sobol"},
            "'shell_weights' cannot be sampled at nodes='sobol'; expected 'shells'",
        ),
    ],
)
def test_errors_of_options_by_name(options, words):
    with pytest.raises(ValueError, match=words) as error:
        make_position("spectral", 2, 8, **options)
    assert "\n" not in str(error.value)
