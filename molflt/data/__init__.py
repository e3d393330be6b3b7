"""Data sets of structures, texts and images, and the batches that they share."""
