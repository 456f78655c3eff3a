"""The second tier of the prefix cache: blocks on disk."""
