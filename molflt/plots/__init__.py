"""Figures of training, predictions, errors, attention and learned encodings, as PNG, SVG or PDF.

The argument `file` is the file to write; its name ends in .png, .svg or .pdf. Matplotlib is
imported when the first figure is drawn and does not need a display. The colors are from the palette
of Okabe and Ito, which is accessible to color-blind readers.
"""

from molflt.plots.attention import (
    attention_matrices,
    has_bias,
    rpe_curves,
    rpe_profiles,
    rpe_surfaces,
    substitutions,
)
from molflt.plots.figure import further_formats
from molflt.plots.parity import calibration, parity
from molflt.plots.structures import structure_views
from molflt.plots.training import (
    best_values,
    loss_curves,
    losses_by_place,
    overlaid_curves,
    training_curve,
)

__all__ = ["attention_matrices", "best_values", "calibration", "further_formats", "has_bias"]
__all__ += ["loss_curves", "losses_by_place", "overlaid_curves", "parity", "rpe_curves"]
__all__ += ["rpe_profiles", "rpe_surfaces", "structure_views", "substitutions", "training_curve"]
