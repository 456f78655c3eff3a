"""How large a request may be: for the service, which refuses larger ones, and for the SDK."""

from __future__ import annotations

from typing import Final

MAX_REQUEST_BYTES: Final = 4 << 20
REASON: Final = "MESSAGE_TOO_LARGE"


def too_large(op: str, num_bytes: int) -> str:
    """Return the error for a request of so many bytes; empty where it is small enough."""
    if num_bytes <= MAX_REQUEST_BYTES:
        return ""
    return f"[{op}] a request must have at most {MAX_REQUEST_BYTES} bytes, got {num_bytes}"
