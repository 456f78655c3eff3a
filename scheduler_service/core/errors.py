"""Errors that the core raises.

```
CoreError
├── InvalidParameterError      a field breaks a rule
├── PromptTooLongError         prompt plus one token can never fit
├── QueueFullError             the waiting queue is at its bound
├── DeadlineUnreachableError   the deadline cannot be met
└── DuplicateRequestError      the id belongs to a live request
InvalidTransitionError         (AssertionError) a bug of ours, never of a caller
```

Outcomes of policy (finished, preempted) are events, not errors: see `events`.
"""

from __future__ import annotations


class CoreError(Exception):
    """A request or a setting that the core refuses."""


class InvalidParameterError(CoreError):
    """A field breaks a rule.

    Attributes:
        op: The operation that refused it, for example `submit`.
        field: Name of the field, for example `top_p`.
        rule: The rule in words, for example `must be in [0, 1]`.
        got: The offending value.
    """

    def __init__(self, op: str, field: str, rule: str, got: object) -> None:
        super().__init__(f"[{op}] {field} {rule}, got {got!r}")
        self.op = op
        self.field = field
        self.rule = rule
        self.got = got


class PromptTooLongError(CoreError):
    """The prompt and one generated token exceed the context or the whole block pool.

    Attributes:
        num_prompt_tokens: Length of the prompt.
        context_length: Most tokens of prompt and output together that the model allows.
        pool_capacity: Tokens that all blocks of the pool can hold.
    """

    def __init__(self, num_prompt_tokens: int, context_length: int, pool_capacity: int) -> None:
        needed = num_prompt_tokens + 1
        if needed <= context_length:
            super().__init__(
                f"[submit] the executor's key/value cache must hold the {num_prompt_tokens} tokens "
                f"of the prompt and one more, {needed} in all, got room for {pool_capacity}: "
                "its kv_memory_mb is too small"
            )
        else:
            super().__init__(
                f"[submit] prompt must have at most {context_length - 1} tokens to leave room for "
                f"one more in the context of {context_length}, got {num_prompt_tokens}"
            )
        self.num_prompt_tokens = num_prompt_tokens
        self.context_length = context_length
        self.pool_capacity = pool_capacity


class QueueFullError(CoreError):
    """The waiting queue is at a bound.

    Attributes:
        unit: What the bound counts: `requests` or `tokens`.
        bound: The bound.
        retry_seconds: When there is likely to be room.
    """

    def __init__(self, unit: str, bound: int, got: int, retry_seconds: float) -> None:
        super().__init__(
            f"[submit] at most {bound} {unit} may wait, got {got}; "
            f"try again in {retry_seconds:.2g} s"
        )
        self.unit = unit
        self.bound = bound
        self.retry_seconds = retry_seconds


class DeadlineUnreachableError(CoreError):
    """The queue before a request and its own prompt take longer than its deadline leaves.

    Attributes:
        needed_seconds: Estimate of the time to the first token.
        left_seconds: Time to the deadline.
        retry_seconds: When the queue is likely to be short enough; None where the prompt alone
            takes too long.
    """

    def __init__(
        self, needed_seconds: float, left_seconds: float, retry_seconds: float | None
    ) -> None:
        what = "its prompt takes" if retry_seconds is None else "the queue and its prompt take"
        super().__init__(
            f"[submit] the first token must be possible within the deadline of "
            f"{left_seconds:.3g} s, got {needed_seconds:.3g} s that {what}"
        )
        self.needed_seconds = needed_seconds
        self.left_seconds = left_seconds
        self.retry_seconds = retry_seconds


class DuplicateRequestError(CoreError):
    """The id belongs to a live request.

    Attributes:
        request_id: The id.
    """

    def __init__(self, request_id: str) -> None:
        super().__init__(f"[submit] request_id must be unique among live ones, got {request_id!r}")
        self.request_id = request_id


class InvalidTransitionError(AssertionError):
    """A (status, input) pair that the transition table does not hold: a bug of ours."""
