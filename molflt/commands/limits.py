"""The range of every number that an option takes, as an interval: [0, 1) holds 0, but not 1.

Constructors refuse what they cannot compute with. Here stands what no run can mean, so that a slip
is told with its option before anything is loaded or written.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["LIMITS", "outside"]

_COUNT = "[1, 2e9]"
_SHARE = "[0, 1)"
_LENGTH = "(0, 100]"  # Å
_ANY = "(-1e15, 1e15)"  # of options of other rooms, which check them themselves

LIMITS = {
    "seed": "[0, 4294967295]",  # NumPy's
    "model.dim": "[1, 65536]",
    "model.heads": "[1, 4096]",
    "model.num_features": "[1, 16384]",
    "model.degree": "[2, 3]",
    "model.image_cutoff": _LENGTH,
    "model.max_frequency": "(0, 10]",  # cycles/Å
    "model.mesh_order": "[4, 8]",
    "model.near_field": "[0, 100]",  # Å
    "model.neighbor_cutoff": _LENGTH,
    "model.long_range": "[1, 6]",
    "model.long_range_channels": "[1, 1024]",
    "model.long_range_cutoff": "[1, 100]",  # Å
    "model.long_range_smearing": "[0, 10]",  # Å
    "model.radial_basis": "[0, 1024]",
    "model.messages": "[0, 64]",
    "model.layers": "[1, 1024]",
    "model.ffn_dim": "[1, 262144]",
    "model.refinements": "[1, 1024]",
    "model.attention_layers": "[0, 1024]",
    "model.norm_eps": "(0, 1]",
    "model.types": "[1, 1024]",
    "model.dropout": _SHARE,
    "model.attention_dropout": _SHARE,
    "model.embedding_dropout": _SHARE,
    "model.head_dropout": _SHARE,
    "model.floor": "[0, 1e6]",
    "model.vocabulary": "[1, 1e8]",
    "model.max_length": "[1, 1e7]",
    "model.position_scale": "(0, 1e6]",
    "model.adaptive_cutoffs": "[1, 1e8]",
    "model.classes": "[1, 1e7]",
    "model.channels": "[1, 1024]",
    "model.image_size": "[1, 16384]",
    "model.patch_size": "[1, 16384]",
    "model.lr": "(0, 1000]",
    "model.window": "[1, 1e7]",
    "model.states": "[1, 65536]",
    "data.batch_size": "[1, 1e6]",
    "data.workers": "[0, 256]",
    "data.max_atoms": _COUNT,
    "data.bucket": "[1, 1e6]",
    "data.length": "[1, 1e7]",
    "data.min_count": _COUNT,
    "data.pieces": "[6, 1e8]",
    "data.max_tokens": _COUNT,
    "data.val_fraction": "(0, 1)",
    "data.split_seed": "[0, 4294967295]",
    "data.image_size": "[1, 16384]",
    "data.resize": "[1, 16384]",
    "model.dimension": "[1, 1000]",
    "model.num_gaussians": "[1, 1024]",
    "model.num_nodes": "[1, 16384]",
    "task.members": "[2, 10000]",
    "task.generations": "[2, 1e6]",
    "task.window": "[2, 1e6]",
    "task.resolution": "(0, 1]",
    "data.problems": "[1, 2147483648]",
    "data.val_problems": "[1, 2147483648]",
    "task.position_weight": "[0, 1e6]",
    "task.position_weight_final": "[0, 1e6]",
    "task.energy_weight": "[0, 1e9]",
    "task.force_weight": "[0, 1e9]",
    "task.stress_weight": "[0, 1e9]",
    "task.energy_mean": "[-1e9, 1e9]",  # eV
    "task.energy_std": "(0, 1e9]",
    "task.interpolate": "[0, 1]",
    "task.repeat": "[0, 1]",
    "task.noise": "[0, 10]",  # Å
    "task.label_smoothing": _SHARE,
    "task.mask_rate": "(0, 1)",
    "task.mask_share": "[0, 1]",
    "task.random_share": "[0, 1]",
    "task.unroll": "[1, 1e6]",
    "task.burn_in": "[0, 1e6]",
    "task.lr": "(0, 1000]",
    "task.warmup_steps": "[0, 2e9]",
    "task.betas": _SHARE,
    "task.eps": "(0, 1]",
    "task.weight_decay": "[0, 1000]",
    "task.redraw_every": _COUNT,
    "task.lr_factors": "(0, 1e6]",
    "trainer.max_steps": _COUNT,
    "trainer.max_epochs": _COUNT,
    "trainer.devices": "[1, 1024]",
    "trainer.gradient_clip": "(0, 1e9]",
    "trainer.val_every": _COUNT,
    "trainer.checkpoint_every": _COUNT,
    "trainer.ema_decay": _SHARE,
    "trainer.log_every": _COUNT,
    "trainer.num_sanity": "[0, 1e6]",
    "trainer.accumulate": "[1, 1e6]",
    "trainer.patience": _COUNT,
    "model.position_options": "[-1e6, 1e6]",
    "model.mixer_options": "[-1e6, 1e6]",
    "val_fraction": "(0, 1)",
    "test_fraction": _SHARE,
    "model.decoder": "[-1e6, 1e6]",
    "batch_size": "[1, 1e6]",
    "mesh_order": "[4, 8]",
    "images": "[1, 1e5]",
    "rows": "[1, 16384]",
    "evaluations": _COUNT,
    "runs": "[1, 100000]",
    "dimension": "[1, 1000]",
    "members": "[2, 10000]",
    "beam": "[1, 1000]",
    "length_penalty": "[0, 100]",
    "steps": "[1, 1e9]",
    "repeats": "[1, 1e6]",
    "rates": "(0, 1e6]",
}


def outside(key: str, value: object) -> str | None:
    """The interval of an option if a number of its value, or within its value, lies outside."""
    interval = LIMITS.get(key, _ANY)
    low, high = (float(end) for end in interval[1:-1].split(","))
    for number in _numbers(value):
        above = number >= low if interval[0] == "[" else number > low
        below = number <= high if interval[-1] == "]" else number < high
        if not (above and below):  # NaN is neither
            return interval
    return None


def _numbers(value: object) -> Iterator[int | float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value
