"""Training: the loop, the folder of a run, and what can be trained."""
