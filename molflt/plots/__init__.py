"""Pictures of training, predictions, errors, attention and learned encodings, as PNG.

Matplotlib is imported when a picture is drawn, and drawn without a display. Colors of lines are
those of Okabe and Ito, which stay apart for color-blind readers.
"""

from molflt.plots.attention import attention_matrices
from molflt.plots.encodings import has_bias, rpe_curves, rpe_profiles, rpe_surfaces
from molflt.plots.runs import intervals, overlaid_curves
from molflt.plots.structures import structure_overview
from molflt.plots.tokens import confusion, image_sheet, losses_by_place, substitutions
from molflt.plots.training import GroupError, errors, parity, training_curve
from molflt.plots.uncertainty import calibration

__all__ = [
    "GroupError",
    "attention_matrices",
    "calibration",
    "confusion",
    "errors",
    "has_bias",
    "image_sheet",
    "intervals",
    "losses_by_place",
    "overlaid_curves",
    "parity",
    "rpe_curves",
    "rpe_profiles",
    "rpe_surfaces",
    "structure_overview",
    "substitutions",
    "training_curve",
]
