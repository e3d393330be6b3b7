"""Text: readers, tokenizers, and batches of tokens."""
