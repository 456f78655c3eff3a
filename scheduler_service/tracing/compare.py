"""Where two traces of one request part: tokens, logits, keys and values, and who wrote those.

Pure: no files, no clock. Positions count from the first token of the prompt; output token i was
drawn from the logits at position (prompt tokens + i - 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scheduler_service.tracing.model import KernelPath, KvBlock, Trace, TraceStep

# Ends after which a request might have had more tokens, had it not been stopped from outside.
CUT_SHORT = frozenset({"cancelled", "deadline", "error"})


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another request's token row in a step."""

    sequence_hash: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Writing:
    """Who wrote one position's keys and values in one run."""

    position: int
    block_index: int
    # None when nobody knows any more.
    step_id: int | None
    # Rows of the step, and of them the ones of the row that wrote the position.
    num_step_tokens: int
    num_row_tokens: int
    num_neighbours: int
    # Empty when there were none, and when the executor no longer knew them.
    neighbours: tuple[Neighbour, ...]
    # Written by another request, whose prefix this one found cached.
    is_shared: bool
    kernel_paths: tuple[KernelPath, ...]
    digest: bytes


@dataclass(frozen=True, slots=True)
class PathDifference:
    """An op that took other kernel paths in one run than in the other."""

    op: str
    a: tuple[KernelPath, ...]
    b: tuple[KernelPath, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two traces have in common, and the first place of each kind where they part.

    Indexes are those of output tokens, positions are absolute; None means no difference.
    """

    num_tokens: tuple[int, int]
    num_compared_tokens: int
    num_compared_logits: int
    num_compared_positions: int
    first_token: int | None
    first_logits: int | None
    # Of the positions that the first differing logits were computed from.
    first_kv: int | None
    # The first of these positions that other kernel paths wrote, and how many there are.
    first_paths: int | None
    num_path_differences: int
    has_kv_digests: bool

    @property
    def is_equal(self) -> bool:
        """Return whether nothing that was compared differs."""
        return self.first_token is None and self.first_logits is None and self.first_kv is None


def obstacles(a: Trace, b: Trace) -> list[str]:
    """Return in which points the traces are not of one request to one model; empty is good."""
    found = []
    x, y = a.header, b.header
    for name in ("weights_digest", "prompt_token_ids", "stop", "stop_token_ids", "ignore_eos"):
        if getattr(x, name) != getattr(y, name):
            found.append(name)
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "logit_bias"):
        if getattr(x.sampling, name) != getattr(y.sampling, name):
            # What is never drawn needs no seed.
            if name == "seed" and x.sampling.temperature == 0 == y.sampling.temperature:
                continue
            found.append(f"sampling.{name}")
    return found


def compare(a: Trace, b: Trace) -> Comparison:
    """Align two traces of one request and find where they part."""
    tokens_a, tokens_b = a.tokens, b.tokens
    count = min(len(tokens_a), len(tokens_b))
    pairs = [(x, y) for (x, _), (y, _) in zip(tokens_a, tokens_b, strict=False)]
    first_token = _first(x.token_id != y.token_id for x, y in pairs)
    longer, shorter = (a, b) if len(tokens_a) > count else (b, a)
    if first_token is None and len(longer.tokens) > count and not is_cut_short(shorter):
        first_token = count
    # Past the first differing token the runs compute different things.
    comparable = pairs if first_token is None else pairs[: first_token + 1]
    compared = [pair for pair in comparable if pair[0].logits_digest and pair[1].logits_digest]
    first_logits = _first(
        bool(x.logits_digest and y.logits_digest) and x.logits_digest != y.logits_digest
        for x, y in comparable
    )
    places = [each for each in (first_token, first_logits) if each is not None]
    # The logits of a token come from all positions up to their own.
    end = len(a.header.prompt_token_ids) + min([*places, count - 1])
    writings_a, writings_b = writings(a), writings(b)
    both = [
        (writings_a[position], writings_b[position])
        for position in range(end)
        if position in writings_a and position in writings_b
    ]
    hashed = [(x, y) for x, y in both if x.digest and y.digest]
    first_kv = next((x.position for x, y in hashed if x.digest != y.digest), None)
    others = [x.position for x, y in both if path_differences(x, y)]
    return Comparison(
        num_tokens=(len(tokens_a), len(tokens_b)),
        num_compared_tokens=count if first_token is None else min(first_token + 1, count),
        num_compared_logits=len(compared),
        num_compared_positions=len(hashed),
        first_token=first_token,
        first_logits=first_logits,
        first_kv=first_kv,
        first_paths=others[0] if others else None,
        num_path_differences=len(others),
        has_kv_digests=bool(hashed),
    )


def is_cut_short(trace: Trace) -> bool:
    """Return whether the request was ended from outside, or never was."""
    return trace.end is None or trace.end.outcome in CUT_SHORT


def _first(differs: Iterator[bool]) -> int | None:
    return next((index for index, each in enumerate(differs) if each), None)


def writings(trace: Trace) -> dict[int, Writing]:
    """Return who wrote each position, as it first was: before any preemption, where there was one.

    What the executor remembered comes first, what the request's own steps say fills the gaps.
    """
    size = trace.header.block_size
    own: dict[tuple[int, int], TraceStep] = {}
    for step in trace.steps:
        for position in range(step.start_position, step.start_position + step.num_row_tokens):
            own[step.generation, position] = step
    found: dict[int, Writing] = {}
    for block in sorted(trace.blocks, key=lambda each: each.generation):
        for slot in range(len(block.steps)):
            position = block.block_index * size + slot
            mine = own.get((block.generation, position))
            found.setdefault(position, _of_block(block, slot, position, mine))
    for (_, position), step in sorted(own.items(), key=lambda each: each[0]):
        found.setdefault(position, _of_step(position, position // size, step, b""))
    return found


def _of_step(position: int, block_index: int, step: TraceStep, digest: bytes) -> Writing:
    return Writing(
        position, block_index, step.step_id, step.num_step_tokens, step.num_row_tokens,
        step.num_neighbours, (), False, step.kernel_paths, digest,
    )  # fmt: skip


def _of_block(block: KvBlock, slot: int, position: int, own: TraceStep | None) -> Writing:
    step = block.steps[slot]
    digest = block.digests[slot] if block.digests else b""
    if step is None:
        if own is not None:
            return _of_step(position, block.block_index, own, digest)
        return Writing(
            position, block.block_index, None, block.max_step_tokens, 0, 0, (), True, (), digest
        )
    rows = list(zip(step.sequence_hashes, step.row_num_tokens, strict=True))
    mine = sum(tokens for sequence, tokens in rows if sequence == block.writer_hash)
    others = tuple(
        Neighbour(sequence, tokens) for sequence, tokens in rows if sequence != block.writer_hash
    )
    return Writing(
        position=position,
        block_index=block.block_index,
        step_id=step.step_id,
        num_step_tokens=step.num_tokens,
        num_row_tokens=own.num_row_tokens if own is not None else mine,
        num_neighbours=own.num_neighbours if own is not None else len(others),
        neighbours=others,
        is_shared=own is None,
        kernel_paths=step.kernel_paths,
        digest=digest,
    )


def path_differences(a: Writing, b: Writing) -> list[PathDifference]:
    """Return the ops by which a position's keys and values came about by other kernel paths.

    Where nothing is known of one side, nothing is said. Attention is that of the row itself:
    which path a neighbour's row took is of no concern here.
    """
    if not a.kernel_paths or not b.kernel_paths:
        return []
    mine, other = _layer_paths(a), _layer_paths(b)
    return [
        PathDifference(op, (mine[op],), (other[op],))
        for op in sorted(mine.keys() & other.keys())
        if (mine[op].path, mine[op].unit) != (other[op].path, other[op].unit)
    ]


def _layer_paths(writing: Writing) -> dict[str, KernelPath]:
    """Return the path of each op as the layers ran it: that of its most dispatches.

    The rest is what ran for wanted positions alone, after the last layer.
    """
    attention = "attention_decode" if writing.num_row_tokens == 1 else "attention_prefill"
    found: dict[str, KernelPath] = {}
    for each in writing.kernel_paths:
        if each.op == "row_statistics" or (each.op == "paged_attention" and each.path != attention):
            continue
        if each.op not in found or each.dispatches > found[each.op].dispatches:
            found[each.op] = each
    return found


def head_differences(a: TraceStep, b: TraceStep) -> list[PathDifference]:
    """Return the ops that two steps ran otherwise, what follows the last layer included."""
    found = []
    for op in sorted({each.op for each in (*a.kernel_paths, *b.kernel_paths)}):
        if op == "paged_attention":
            continue
        mine = tuple(each for each in a.kernel_paths if each.op == op)
        other = tuple(each for each in b.kernel_paths if each.op == op)
        if mine != other:
            found.append(PathDifference(op, mine, other))
    return found
