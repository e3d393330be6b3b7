"""Images: files and folders, their augmentation, and batches."""
