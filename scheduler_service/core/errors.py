"""Errors that the core raises.

```
CoreError
├── InvalidParameterError      a field breaks a rule
├── PromptTooLongError         prompt plus one token can never fit
├── QueueFullError             the waiting queue is at its bound
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
        limit = min(context_length, pool_capacity)
        name = "context" if context_length <= pool_capacity else "block pool"
        super().__init__(
            f"[submit] prompt must have at most {limit - 1} tokens to leave room for one more "
            f"in the {name} of {limit}, got {num_prompt_tokens}"
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.context_length = context_length
        self.pool_capacity = pool_capacity


class QueueFullError(CoreError):
    """The waiting queue is at its bound.

    Attributes:
        max_num_waiting: The bound.
    """

    def __init__(self, max_num_waiting: int) -> None:
        super().__init__(
            f"[submit] at most {max_num_waiting} requests may wait, got one more; try again later"
        )
        self.max_num_waiting = max_num_waiting


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
