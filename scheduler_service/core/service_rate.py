"""How fast this server has been of late, from what it measured: for deadlines and retry hints."""

from __future__ import annotations

from typing import Final

MIN_STEP_TOKENS: Final = 16
"""Fewest prompt tokens of a step that says something about the speed of prompts."""

DEFAULT_RETRY_SECONDS: Final = 0.5
"""Retry hint before anything was measured."""

_MIN_RETRY_SECONDS: Final = 0.05
_MAX_RETRY_SECONDS: Final = 60.0
# Share of the newest value in an average: the last ten or so count.
_NEW: Final = 0.1


class _Average:
    """An exponentially weighted mean; the first value counts whole."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + _NEW * (value - self.value)


class ServiceRate:
    """Averages over the last steps and admissions. Times are monotonic seconds."""

    __slots__ = (
        "_admission_tokens",
        "_cached_share",
        "_gap",
        "_last_admission",
        "_step_seconds",
        "_step_tokens",
    )

    def __init__(self) -> None:
        self._step_tokens = _Average()
        self._step_seconds = _Average()
        self._gap = _Average()
        self._admission_tokens = _Average()
        self._cached_share = _Average()
        self._last_admission: float | None = None

    def record_step(self, num_prompt_tokens: int, num_tokens: int, seconds: float) -> None:
        """Learn from a step that mostly computed prompts; others say little of their speed."""
        if num_prompt_tokens >= MIN_STEP_TOKENS and 2 * num_prompt_tokens >= num_tokens:
            self._step_tokens.add(float(num_tokens))
            self._step_seconds.add(seconds)

    def record_admission(
        self, arrival: float, now: float, num_tokens: int, num_cached_tokens: int
    ) -> None:
        """Learn how long the queue took for one more request; idle time does not count."""
        since = arrival if self._last_admission is None else max(arrival, self._last_admission)
        self._gap.add(max(0.0, now - since))
        self._admission_tokens.add(float(num_tokens))
        self._cached_share.add(num_cached_tokens / num_tokens)
        self._last_admission = now

    @property
    def token_seconds(self) -> float | None:
        """What a token of a prompt took, or None before anything was measured."""
        tokens, seconds = self._step_tokens.value, self._step_seconds.value
        return None if not tokens or seconds is None else seconds / tokens

    @property
    def cached_share(self) -> float:
        """The share of prompts that came from the prefix cache, in [0, 1]."""
        return self._cached_share.value or 0.0

    def retry_seconds(self, num_requests: int = 1, num_tokens: int = 0) -> float:
        """Return when so many requests and tokens will have left the queue, in seconds."""
        gap, tokens = self._gap.value, self._admission_tokens.value
        if gap is None or tokens is None:
            return DEFAULT_RETRY_SECONDS
        return clamp_retry(gap * max(float(num_requests), num_tokens / max(tokens, 1.0)))


def clamp_retry(seconds: float) -> float:
    """Return a retry hint within its bounds."""
    return min(max(seconds, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)
