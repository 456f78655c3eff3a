"""How a channel to the scheduler is set up, for both faces of the SDK."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Final

from scheduler_service.client._errors import InvalidRequestError, IsobatchError, UnavailableError

SERVICE_NAME: Final = "isobatch.scheduler.v1.SchedulerService"
HEALTH_METHOD: Final = "/grpc.health.v1.Health/Check"

_MAX_MESSAGE_BYTES: Final = 64 << 20

# gRPC counts nanoseconds in 64 bits: a deadline that does not fit would be one that has passed.
_LONGEST_SECONDS: Final = 1e9

ChannelOptions = list[tuple[str, str | int]]

# gRPC's own retries cover short gaps: four attempts within about a second, and only before the
# first message of a stream, which is Accepted. Longer waits follow RetryInfo (see Backoff).
_SERVICE_CONFIG: Final = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{"service": SERVICE_NAME}],
                "retryPolicy": {
                    "maxAttempts": 4,
                    "initialBackoff": "0.05s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
)


def channel_options(address: str) -> ChannelOptions:
    """Return the options of a channel to `address`: `unix:PATH` or `host:port`."""
    options: ChannelOptions = [
        ("grpc.service_config", _SERVICE_CONFIG),
        # A client owns its connection: another client's failures must not put this one in backoff.
        ("grpc.use_local_subchannel_pool", 1),
        # The server is local and may be starting, so look again soon.
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # A proxy for the web must not be asked for a loopback address.
        ("grpc.enable_http_proxy", 0),
        # The last piece of a long request's trace is larger than gRPC's 4 MiB.
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ]
    if not address.startswith("unix:"):
        options += [
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 0),
        ]
    return options


def sync_channel_options(address: str) -> ChannelOptions:
    """Return the options of a synchronous channel."""
    # Streams are read on the caller's own thread: a quarter less processor time for each message.
    return [*channel_options(address), ("SingleThreadedUnaryStream", 1)]


def no_connection(address: str, timeout: float) -> UnavailableError:
    """Return the error for a connection that did not come up in `timeout` seconds."""
    return UnavailableError(
        f"[connect] a scheduler must answer within {timeout:g} s, got no connection to {address}"
    )


def deadline_after(timeout: float | None, now: float) -> float | None:
    """Return the time `timeout` seconds after `now`; None where nobody could wait for so long.

    Raises InvalidRequestError for a NaN.
    """
    if timeout is None:
        return None
    if math.isnan(timeout):
        raise InvalidRequestError(f"[call] timeout must be a number of seconds, got {timeout}")
    return now + timeout if timeout < _LONGEST_SECONDS else None


class Backoff:
    """Decides how long to wait before a call is tried again, by the server's RetryInfo.

    Only UNAVAILABLE is tried again, only where the server says when, and for no more than
    `limit_seconds` from the first attempt.
    """

    def __init__(self, limit_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._give_up_at = clock() + limit_seconds

    def delay(self, error: IsobatchError) -> float | None:
        """Return the seconds to wait before the next attempt, or None to give up."""
        delay = error.retry_after_seconds
        if not isinstance(error, UnavailableError) or delay is None:
            return None
        return delay if self._clock() + delay <= self._give_up_at else None
