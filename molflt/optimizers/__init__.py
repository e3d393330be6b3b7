"""Optimizers that are learned, with the attention core as their memory."""
