"""Training: the training loop, the run folder and the recipes."""
