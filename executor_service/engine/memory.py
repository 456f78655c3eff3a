"""Gives memory back to the system once a model is loaded."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys

import mlx.core as mx


def give_back() -> None:
    """Return what loading left: arrays without owner, MLX's cache, the allocator's free heap.

    Repacked weights live in the backend, so the loader's copies are garbage by now; glibc keeps
    freed memory unless it is told otherwise. What is left of Python's objects stays for good, so
    the collector need not look at it again in the middle of a step.
    """
    gc.collect()
    gc.freeze()
    mx.clear_cache()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
