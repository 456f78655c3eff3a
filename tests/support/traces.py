"""Traces made by hand: one request of a short prompt, decoded row by row."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from scheduler_service.core import SamplingParams
from scheduler_service.tracing.model import (
    NO_DIGEST,
    KernelPath,
    KvBlock,
    KvStep,
    Trace,
    TraceEnd,
    TraceHeader,
    TraceStep,
    TraceToken,
    chained,
)

MINE = 0xABCD
PROMPT = tuple(range(10, 22))
HEADER = TraceHeader(
    request_id="r",
    arrival_unix_ns=1_700_000_000_000_000_000,
    model="toy",
    weights_digest="00ff",
    numeric_class="threshold4",
    kv_class="f16",
    device="cpu vnni a processor",
    block_size=16,
    prompt_token_ids=PROMPT,
    sampling=SamplingParams(temperature=0.5, top_k=7, seed=2**64 - 1, logit_bias=((3, -1.5),)),
    max_tokens=50,
    stop=("end",),
    stop_token_ids=(5, 9),
    ignore_eos=True,
    has_kv_digests=True,
)


def digest(*parts: object) -> bytes:
    """A digest of anything."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def linear(path: str, dispatches: int = 8) -> KernelPath:
    """A linear layer's path."""
    return KernelPath("linear", path, "vnni", dispatches)


def paths(linear_path: str, head_path: str = "gemv", attention: str = "attention_decode",
          ) -> tuple[KernelPath, ...]:  # fmt: skip
    """The paths of a step."""
    return (
        KernelPath("embed", "other", "vnni", 1),
        linear(linear_path),
        KernelPath("paged_attention", attention, "vnni", 2),
        linear(head_path, 1),
    )


def make_trace(
    tokens: Sequence[int],
    *,
    bad_logits_from: int = 10_000,
    bad_kv_from: int = 10_000,
    crowds: Mapping[int, tuple[int, ...]] | None = None,
    threshold: int = 4,
    first_step: int = 1,
    header: TraceHeader = HEADER,
    outcome: str = "length",
) -> Trace:
    """A request that was prefilled in one step and decoded in one step a token.

    `crowds` gives the rows of neighbours by output index. From the given output index on logits
    are other ones, from the given position on keys and values.
    """
    prompt = len(header.prompt_token_ids)
    steps: list[TraceStep] = []
    kv_steps: list[KvStep] = []
    for index, token_id in enumerate(tokens):
        others = (crowds or {}).get(index, ())
        count = prompt if index == 0 else 1
        rows = count + sum(others)
        used = paths(
            "gemv" if rows <= threshold else "gemm",
            attention="attention_decode" if index else "attention_prefill",
        )
        token = TraceToken(
            position=prompt + index - 1,
            token_id=token_id,
            logits_digest=digest("logits", index, index >= bad_logits_from),
            top_ids=(token_id, token_id + 1),
            top_logits=(2.5, 2.5 - 0.25 * (index + 1)),
        )
        start = 0 if index == 0 else prompt + index - 1
        steps.append(
            TraceStep(
                step_id=first_step + index, generation=0, start_position=start,
                num_row_tokens=count, num_step_tokens=rows, num_step_rows=1 + len(others),
                num_wanted=1, max_neighbour_tokens=max(others, default=0), kernel_paths=used,
                start_ns=1000 * index, duration_ns=900, executor_ns=500, tokens=(token,),
            )
        )  # fmt: skip
        kv_steps.append(
            KvStep(first_step + index, rows, 1, used, (MINE, *range(1, 1 + len(others))),
                   (count, *others))
        )  # fmt: skip
    positions = prompt + len(tokens) - 1
    blocks = []
    for block_index in range(-(-positions // header.block_size)):
        span = range(
            block_index * header.block_size, min(positions, (block_index + 1) * header.block_size)
        )
        blocks.append(
            KvBlock(
                generation=0, block_index=block_index, writer_hash=MINE, first_step_id=1,
                last_step_id=2, min_step_tokens=1, max_step_tokens=12,
                steps=tuple(kv_steps[max(0, each - prompt + 1)] for each in span),
                digests=tuple(digest("kv", each, each >= bad_kv_from) for each in span)
                if header.has_kv_digests else (),
            )
        )  # fmt: skip
    running = chained(NO_DIGEST, (step.tokens[0].logits_digest for step in steps))
    ending = TraceEnd(outcome, len(tokens), running, 0)
    return Trace(header, tuple(steps), tuple(blocks), ending)


def without_kv_digests(trace: Trace) -> Trace:
    """The same trace, as it is without --trace-kv."""
    blocks = tuple(replace(each, digests=()) for each in trace.blocks)
    return replace(trace, blocks=blocks, header=replace(trace.header, has_kv_digests=False))
