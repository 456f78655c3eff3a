"""The engine: one model's steps, from a step request to its answer."""
