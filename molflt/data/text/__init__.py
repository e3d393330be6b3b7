"""Text: sources, vocabularies and blocks of tokens."""
