"""Model files, tokenizers, and one Program builder for each architecture."""
