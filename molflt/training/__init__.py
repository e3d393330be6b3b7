"""Training: the loop, the run folder, and recipes of what can be trained."""
