"""Ranges of numeric options, and readable error messages for options.

Ranges are intervals: [0, 1) contains 0 but not 1.
"""

import operator
import re
from collections.abc import Iterator, Mapping

from molflt.files import shown

_RANGES = {
    "[1, 2e9]": """
        batch_size best data.batch_size data.bucket data.length data.max_atoms data.max_tokens
        data.min_count data.problems data.val_problems evaluations images layers limit
        model.adaptive_cutoffs model.classes model.max_length model.vocabulary model.window repeats
        runs steps task.redraw_every task.unroll top_k trainer.accumulate trainer.checkpoint_every
        trainer.log_every trainer.max_epochs trainer.max_steps trainer.patience
        trainer.val_every""",
    "[0, 2e9]": """
        model.floor relax_steps task.burn_in task.energy_weight task.force_weight
        task.position_weight task.position_weight_final task.stress_weight task.warmup_steps
        task.weight_decay tokens trainer.num_sanity""",
    "[1, 262144]": """
        beam data.image_size data.resize dimension model.channels model.dim model.dimension
        model.ffn_dim model.heads model.image_size model.layers model.long_range_channels
        model.num_features model.num_gaussians model.num_nodes model.patch_size model.refinements
        model.states model.types repeat rows trainer.devices workers""",
    "[0, 65536]": "data.workers model.attention_layers model.messages model.radial_basis",
    "[2, 1e6]": "members task.generations task.members task.window",
    "[0, 4294967295]": "data.split_seed seed",  # the range of NumPy's seeds
    "[6, 1e8]": "data.pieces",
    "[4, 8]": "mesh_order model.mesh_order",
    "[2, 3]": "model.degree",
    "[1, 6]": "model.long_range",
    "(0, 1)": "data.val_fraction task.mask_rate val_fraction",
    "[0, 1)": """
        model.attention_dropout model.dropout model.embedding_dropout model.head_dropout task.betas
        task.label_smoothing test_fraction trainer.ema_decay""",
    "(0, 1]": "model.norm_eps task.eps task.resolution",
    "[0, 1]": "task.interpolate task.mask_share task.random_share task.repeat",
    "(0, 1e9]": """
        fmax model.lr model.position_scale rates task.energy_std task.lr task.lr_factors
        trainer.gradient_clip""",
    "[-1e9, 1e9]": "task.energy_mean",
    "[-1e6, 1e6]": "model.decoder model.mixer_options model.position_options",
    "(0, 100]": "model.image_cutoff model.neighbor_cutoff",  # Å
    "[0, 100]": "length_penalty model.long_range_smearing model.near_field task.noise",
    "[1, 100]": "model.long_range_cutoff",  # Å
    "[1, 360]": "rotation",  # degrees
    "[5, 1000]": "vacuum",  # Å
    "(0, 10]": "model.max_frequency",  # cycles/Å
}
_SHORTER = (  # patterns in error messages from jsonargparse, and their replacements
    (r"<class '(?:\w+\.)?(\w+)'>", r"\1"),
    (r"typing\.", ""),
    (
        r"Does not validate .* Subtypes: \[(.*)\] Errors: .* Given value: ",
        r"expected one of \1; got ",
    ),
    (r"Expected a Literal\[(.*?)\]", r"expected one of \1"),
    (r"Literal\[(.*?)\]", r"\1"),
    (r"Expected a ", "expected "),
    (r"\. Got value: ", "; got "),
    (r'Parser key "(.*?)"', r"\1"),
    ("NoneType", "null"),
)
LIMITS = {name: interval for interval, names in _RANGES.items() for name in names.split()}


def readable(error: Exception) -> str:
    """Shortens an error message from jsonargparse to one line."""
    text = " ".join(str(error).split())
    for pattern, shorter in _SHORTER:
        text = re.sub(pattern, shorter, text)
    return text


def check_ranges(options: Mapping[str, object]) -> None:
    """Raises ValueError for the first option, such as "trainer.max_steps", that is out of range."""
    for key, value in options.items():
        interval = LIMITS.get(key, "(-1e15, 1e15)")  # range of options that are not listed
        low, high = (float(end) for end in interval[1:-1].split(","))
        above = operator.ge if interval[0] == "[" else operator.gt
        below = operator.le if interval[-1] == "]" else operator.lt
        if not all(above(x, low) and below(x, high) for x in _numbers(value)):  # includes NaN
            kind = type(value).__name__ if isinstance(value, int | float) else "numbers"
            raise ValueError(f"{key}: expected {kind} in {interval}; got {shown(value)}")


def _numbers(value: object) -> Iterator[int | float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value
