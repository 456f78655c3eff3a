"""The draft model: a second Program beside the target that proposes tokens for it to verify."""
