"""When a request ends by its tokens. Stop strings are the shell's: the core sees no text."""

from __future__ import annotations

from scheduler_service.core.request import FinishReason, Request


def reason_to_stop(request: Request) -> FinishReason | None:
    """Return why the request ends after its last output token, or None.

    A stop token wins over the length when both hold.
    """
    if request.output_token_ids[-1] in request.stop_token_ids:
        return FinishReason.STOP
    if len(request.output_token_ids) >= request.max_tokens:
        return FinishReason.LENGTH
    return None
