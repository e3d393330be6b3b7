"""Data by kind, structures, text and images, and the batches that all of them share."""
