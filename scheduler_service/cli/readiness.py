"""Waits until a scheduler serves, by the standard health service."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

POLL_SECONDS: Final = 0.02
_CALL_SECONDS: Final = 1.0


def wait_until_serving(address: str, keep_waiting: Callable[[], bool]) -> bool:
    """Return True once the scheduler at `address` says SERVING, False once `keep_waiting` does."""
    # Imported here: the caller starts its processes first, and they need the time that this takes.
    import grpc
    from grpc_health.v1 import health_pb2

    from scheduler_service.client._channel import HEALTH_METHOD, channel_options

    response_class = health_pb2.HealthCheckResponse

    with grpc.insecure_channel(address, channel_options(address)) as channel:
        check = channel.unary_unary(HEALTH_METHOD, bytes, response_class.FromString)
        while keep_waiting():
            try:
                # An empty request asks for the server as a whole.
                if check(b"", timeout=_CALL_SECONDS).status == response_class.SERVING:
                    return True
            except grpc.RpcError:
                # Not there yet.
                pass
            time.sleep(POLL_SECONDS)
    return False
