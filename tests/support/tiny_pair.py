"""The tiny model that end-to-end tests share, and how its pair of processes is started."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.support.bystanders import bystander_requests
from tests.support.healthy_pair import HealthyPair, healthy_pair
from tests.support.tiny_model import Storage, TinyShape, write_directory
from tests.support.tiny_tokenizer import vocab_size

# The vocabulary is wider than the tokenizer, as in models that pad theirs. A pool of 256 blocks of
# 16 positions holds little more than one context.
SHAPE: Final = TinyShape(vocab_size=vocab_size() + 13, context_length=4000)
EXECUTOR_FLAGS: Final = ("--kv-memory-mb", "1", "--threads", "1")


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def tiny_pair(folder: Path, metrics_port: int) -> Iterator[HealthyPair]:
    """Write the model to `folder` and serve it; the scheduler's metrics page is at the port."""
    write_directory(folder, SHAPE, Storage(4))
    requests = bystander_requests(30, [[50, 206, 282], [28, 39, 16], [45, 46], [*range(100, 140)]])
    flags = ("--metrics-port", str(metrics_port))
    with healthy_pair(
        folder, requests, executor_flags=EXECUTOR_FLAGS, scheduler_flags=flags
    ) as pair:
        yield pair
