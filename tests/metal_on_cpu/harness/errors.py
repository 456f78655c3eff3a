"""Errors of the harness."""


class MetalError(RuntimeError):
    """The text does not compile as Metal here, or a launch broke a rule; the message says where."""
