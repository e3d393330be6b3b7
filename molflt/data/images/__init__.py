"""Images: readers, augmentation, and batches."""
