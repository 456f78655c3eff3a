"""What a comparison of two traces says, in plain words and as plain data. Pure."""

from __future__ import annotations

from typing import Any

from scheduler_service.tracing.compare import (
    Comparison,
    PathDifference,
    Writing,
    head_differences,
    path_differences,
    writings,
)
from scheduler_service.tracing.model import KernelPath, Trace, TraceStep, TraceToken

# Classes in which every kernel gives the same bits (docs/numerics.md section 6).
_EXACT = "X1"


def words(a: Trace, b: Trace, found: Comparison) -> list[str]:
    """Return lines that say whether and where the runs part, and what made them.

    The runs are called A and B. `found` is `compare(a, b)`.
    """
    lines = []
    if a.header.numeric_class != b.header.numeric_class:
        lines.append(
            f"The numeric classes differ: A {a.header.numeric_class}, B {b.header.numeric_class}. "
            "Other bits are to be expected."
        )
    if found.is_equal:
        return [*lines, *_equal(found)]
    lines += _token(a, b, found)
    lines += _logits(a, found)
    lines += _cache(a, b, found)
    return lines


def _equal(found: Comparison) -> list[str]:
    compared = [
        f"{found.num_compared_tokens} tokens",
        f"{found.num_compared_logits} rows of logits",
    ]
    if found.has_kv_digests:
        compared.append(f"{found.num_compared_positions} positions of keys and values")
    lines = ["Equal: " + ", ".join(compared) + "."]
    if found.num_path_differences:
        lines.append(
            f"Positions that other kernel paths wrote: {found.num_path_differences}. Every bit of "
            "them is the same."
        )
    return lines


def _token(a: Trace, b: Trace, found: Comparison) -> list[str]:
    index = found.first_token
    if index is None:
        return [
            f"The {found.num_compared_tokens} tokens are equal; what they were drawn from is not."
        ]
    sides = [("A", a), ("B", b)]
    ended = [name for name, trace in sides if index >= len(trace.tokens)]
    if ended:
        return [f"The tokens are equal until {ended[0]} ends, before output token {index}."]
    drawn = [(name, *trace.tokens[index]) for name, trace in sides]
    lines = [
        f"Output token {index} is the first that differs: "
        + ", ".join(f"{name} drew {token.token_id}" for name, token, _ in drawn)
        + "."
    ]
    return lines + [f"  {name}: {_top(token)}" for name, token, _ in drawn]


def _top(token: TraceToken) -> str:
    top = ", ".join(
        f"{token_id} at {logit:.6f}"
        for token_id, logit in zip(token.top_ids, token.top_logits, strict=True)
    )
    margin = "" if token.margin is None else f", margin {token.margin:.6f}"
    return f"largest logits {top}{margin}"


def _logits(a: Trace, found: Comparison) -> list[str]:
    index = found.first_logits
    if index is None:
        return ["The logits of all compared tokens are equal; the draws alone differ."]
    place = f"output token {index} on (position {a.tokens[index][0].position})"
    if found.first_token is not None and index < found.first_token:
        return [f"The logits differ from {place}, before any token does."]
    return [f"The logits differ from {place}."]


def _cache(a: Trace, b: Trace, found: Comparison) -> list[str]:
    if found.first_kv is not None:
        return _position(a, b, found.first_kv)
    if found.first_logits is None:
        return []
    step_a, step_b = (trace.tokens[found.first_logits][1] for trace in (a, b))
    if found.has_kv_digests:
        lines = [
            f"All {found.num_compared_positions} positions of keys and values that they were "
            "computed from are equal, so it happened after the last layer's cache."
        ]
        return lines + _steps(step_a, step_b)
    lines = ["Digests of keys and values are not in both traces (--trace-kv adds them)."]
    if found.first_paths is None or a.header.numeric_class != b.header.numeric_class:
        # Between two classes no path is more suspect than another.
        return [*lines, *_steps(step_a, step_b)]
    lines.append(
        f"The first position that other kernel paths wrote is {found.first_paths}, one of "
        f"{found.num_path_differences}; it is the suspect."
    )
    return lines + _position(a, b, found.first_paths)[1:]


def _position(a: Trace, b: Trace, position: int) -> list[str]:
    size = a.header.block_size
    block = position // size
    lines = [
        f"Keys and values differ from position {position} on: block {block} "
        f"(positions {block * size} to {block * size + size - 1}); all before it are equal."
    ]
    first, second = writings(a)[position], writings(b)[position]
    lines += [f"  A: {_writer(first)}", f"  B: {_writer(second)}"]
    differences = path_differences(first, second)
    lines += [
        f"  {each.op}: A ran {_paths(each.a)}, B ran {_paths(each.b)}" for each in differences
    ]
    if a.header.numeric_class != b.header.numeric_class:
        return [*lines, "Two classes are two kinds of arithmetic; no kernel is at fault."]
    return [*lines, _why(a, first, second, differences)]


def _writer(writing: Writing) -> str:
    if writing.step_id is None:
        return "written by another request in a step that is no longer remembered"
    rows = _count(writing.num_step_tokens, "row")
    text = f"written by step {writing.step_id}, which had {rows}"
    if writing.is_shared:
        text += ", for another request whose prefix was found in the cache"
    if writing.num_neighbours == 0:
        return text + (", alone" if not writing.is_shared else "")
    neighbours = _count(writing.num_neighbours, "neighbour")
    text += f": {writing.num_row_tokens} of its own and those of {neighbours}"
    if writing.neighbours:
        named = ", ".join(
            f"{each.sequence_hash:016x} with {each.num_tokens}" for each in writing.neighbours[:8]
        )
        more = len(writing.neighbours) - 8
        text += f" ({named}{f' and {more} more' if more > 0 else ''})"
    return text


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _paths(paths: tuple[KernelPath, ...]) -> str:
    return " and ".join(f"{each.path} ({each.unit})" for each in paths) or "nothing"


def _why(a: Trace, x: Writing, y: Writing, differences: list[PathDifference]) -> str:
    ops = ", ".join(each.op for each in differences)
    is_exact = a.header.numeric_class.startswith(_EXACT)
    if not differences:
        if is_exact or x.num_step_tokens == y.num_step_tokens:
            return (
                "The kernel paths are the same on both sides, so this is a fault: please report "
                "it with both traces."
            )
        return (
            f"The kernel paths have the same names on both sides. In class "
            f"{a.header.numeric_class} the number of rows ({x.num_step_tokens} in A, "
            f"{y.num_step_tokens} in B) may choose other kernels behind a name, and it did."
        )
    if is_exact:
        return (
            f"{ops} took other kernels there, which must not matter in an exact class: this is a "
            "fault, please report it with both traces."
        )
    if x.num_step_tokens == y.num_step_tokens:
        return f"So the runs part because {ops} took other kernels there."
    more, fewer, name = (x, y, "A") if x.num_step_tokens > y.num_step_tokens else (y, x, "B")
    largest = max((each.num_tokens for each in more.neighbours), default=0)
    cause = f"step {more.step_id} of {name} had {more.num_step_tokens} rows"
    if largest:
        cause += f", {largest} of them of one neighbour,"
    return (
        f"So the runs part because {cause} where the other had {fewer.num_step_tokens}, and with "
        f"so many rows {ops} takes other kernels, which add in another order in class "
        f"{a.header.numeric_class}."
    )


def _steps(a: TraceStep, b: TraceStep) -> list[str]:
    lines = []
    for name, step in (("A", a), ("B", b)):
        lines.append(
            f"  {name}: step {step.step_id} had {_count(step.num_step_tokens, 'row')}, "
            f"{_count(step.num_wanted, 'wanted position')} and "
            f"{_count(step.num_neighbours, 'neighbour')}"
        )
    return lines + [
        f"  {each.op}: A ran {_dispatches(each.a)}, B ran {_dispatches(each.b)}"
        for each in head_differences(a, b)
    ]


def _dispatches(paths: tuple[KernelPath, ...]) -> str:
    return ", ".join(f"{each.path} ({each.unit}) x {each.dispatches}" for each in paths) or "none"


def plain(a: Trace, b: Trace, found: Comparison) -> dict[str, Any]:
    """Return the same as plain data for JSON."""
    first = found.first_kv if found.first_kv is not None else found.first_paths
    known_a, known_b = writings(a), writings(b)
    document: dict[str, Any] = {
        "equal": found.is_equal,
        "numeric_classes": [a.header.numeric_class, b.header.numeric_class],
        "num_tokens": list(found.num_tokens),
        "num_compared_tokens": found.num_compared_tokens,
        "num_compared_logits": found.num_compared_logits,
        "num_compared_positions": found.num_compared_positions,
        "first_token": _token_data(a, b, found.first_token),
        "first_logits": _token_data(a, b, found.first_logits),
        "first_kv_position": found.first_kv,
        "first_kv_block": None if found.first_kv is None else found.first_kv // a.header.block_size,
        "first_paths_position": found.first_paths,
        "num_path_differences": found.num_path_differences,
        "written_by": None
        if first is None or found.is_equal
        else [_writing_data(known[first]) for known in (known_a, known_b)],
    }
    return document


def _token_data(a: Trace, b: Trace, index: int | None) -> dict[str, Any] | None:
    if index is None:
        return None
    sides = [trace.tokens[index] if index < len(trace.tokens) else None for trace in (a, b)]
    return {
        "index": index,
        "runs": [
            None
            if side is None
            else {
                "token_id": side[0].token_id,
                "position": side[0].position,
                "step_id": side[1].step_id,
                "top_ids": list(side[0].top_ids),
                "top_logits": list(side[0].top_logits),
                "margin": side[0].margin,
            }
            for side in sides
        ],
    }


def _writing_data(writing: Writing) -> dict[str, Any]:
    return {
        "position": writing.position,
        "block": writing.block_index,
        "step_id": writing.step_id,
        "num_step_tokens": writing.num_step_tokens,
        "num_row_tokens": writing.num_row_tokens,
        "num_neighbours": writing.num_neighbours,
        "neighbours": [
            {"sequence": f"{each.sequence_hash:016x}", "num_tokens": each.num_tokens}
            for each in writing.neighbours
        ],
        "is_shared": writing.is_shared,
        "kernel_paths": [
            {"op": each.op, "path": each.path, "unit": each.unit, "dispatches": each.dispatches}
            for each in writing.kernel_paths
        ],
    }
