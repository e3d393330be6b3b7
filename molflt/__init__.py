"""Linear-cost Transformers (FourierLearner-Transformer) on 3-D atomic structures."""

__version__ = "0.1.0"
