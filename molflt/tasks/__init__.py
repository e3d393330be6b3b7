"""Tasks: the loss and the metrics of each recipe."""
