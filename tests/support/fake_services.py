"""Stand-ins for the two services as processes: `python fake_services.py SERVICE FLAGS...`.

The executor says that it is up and waits. The scheduler is the fake of `fake_scheduler`; it serves
once the executor is there, and with the variable FAKE_ENDLESS_DRAIN answers on after SIGTERM. A
model named `missing` is a configuration error, as with the real one; one named `crash` ends the
executor with a traceback, and one named `slow` never gets ready. Stdlib first: a test starts many
of these.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from pathlib import Path


def main() -> None:
    """Run the service named by the first argument, with the flags that its real namesake takes."""
    service, *flags = sys.argv[1:]
    if service == "executor_service.models.pull":
        pull(flags[0])
        return
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--metrics-port", type=int)
    if service == "executor_service":
        parser.add_argument("--model", required=True)
        parser.add_argument("--kv-memory-mb", type=int)
        parser.add_argument("--threads", type=int)
        parser.add_argument("--draft-model", default="")
        run_executor(parser.parse_args(flags))
    else:
        parser.add_argument("--executor", required=True)
        parser.add_argument("--speculation", default="")
        run_scheduler(parser.parse_args(flags))


def pull(name: str) -> None:
    """Print progress and a path, or fail."""
    print(f"pulling {name}", file=sys.stderr)
    if name == "missing":
        sys.exit(78)
    print("a remark")
    print(f"/models/{name} v1.gguf")


def run_executor(options: argparse.Namespace) -> None:
    """Leave a file at the socket's path while running."""
    if options.model == "missing":
        print("[executor] a model must exist, got missing")
        sys.exit(78)
    if options.model == "crash":
        raise RuntimeError("crashed on purpose")
    ended = Ended()
    if options.model == "slow":
        ended.wait()
        return
    path = socket_path(options.listen)
    path.write_text("")
    print(f"executor pid {os.getpid()}")
    print(f"executor up: {options.model} {options.kv_memory_mb} {options.threads}")
    if options.draft_model:
        print(f"executor drafts with {options.draft_model}")
    ended.wait()
    path.unlink()
    print("executor goodbye")


def run_scheduler(options: argparse.Namespace) -> None:
    """Serve like the fake scheduler once the executor is there."""
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from grpc_health.v1 import health_pb2

    from tests.support.fake_scheduler import FakeScheduler

    ended = Ended()
    path = socket_path(options.listen)
    with FakeScheduler(path) as fake:
        fake.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        print("scheduler up")
        if options.speculation:
            print(f"scheduler speculates by {options.speculation}")
        while not socket_path(options.executor).exists():
            if ended.wait(0.02):
                return
        fake.health.set("", health_pb2.HealthCheckResponse.SERVING)
        ended.wait()
        while "FAKE_ENDLESS_DRAIN" in os.environ:
            signal.pause()
    print("scheduler goodbye")


def socket_path(address: str) -> Path:
    """Return the path in a Unix address."""
    return Path(address.removeprefix("unix:"))


class Ended:
    """Whether SIGTERM has come. No lock: a handler that waits for one held below it never ends."""

    def __init__(self) -> None:
        self._reader, writer = os.pipe()
        signal.signal(signal.SIGTERM, lambda number, frame: os.write(writer, b"x") and None)

    def wait(self, timeout: float | None = None) -> bool:
        """Return whether it has come, at the latest after so many seconds."""
        return bool(select.select([self._reader], [], [], timeout)[0])


if __name__ == "__main__":
    main()
