"""A trace as lines of JSON, and its steps for Perfetto. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from scheduler_service.tracing.model import NO_DIGEST, KernelPath, Trace, TraceStep, chained


def json_lines(trace: Trace) -> Iterator[str]:
    """Return one line for each record; digests are hexadecimal.

    Tokens also get their margin and the running digest up to them, blocks the digest of theirs.
    """
    header = asdict(trace.header)
    header["sampling"]["logit_bias"] = dict(trace.header.sampling.logit_bias)
    yield _line("header", header)
    running = NO_DIGEST
    kept = {token.position for token, _ in trace.tokens}
    for step in trace.steps:
        tokens = []
        for token in step.tokens:
            if token.position not in kept:
                continue
            running = chained(running, (token.logits_digest,))
            tokens.append(
                {
                    "position": token.position,
                    "token_id": token.token_id,
                    "top_ids": token.top_ids,
                    "top_logits": token.top_logits,
                    "margin": token.margin,
                    "logits_digest": token.logits_digest.hex(),
                    "running_digest": running.hex(),
                }
            )
        yield _line("step", {**_step(step), "tokens": tokens})
    for block in trace.blocks:
        values = asdict(block)
        del values["steps"]
        values["writer_hash"] = f"{block.writer_hash:016x}"
        values["position_steps"] = [None if each is None else each.step_id for each in block.steps]
        values["digests"] = [each.hex() for each in block.digests]
        values["digest"] = chained(NO_DIGEST, block.digests).hex() if block.digests else ""
        yield _line("kv_block", values)
    if trace.end is not None:
        ending = asdict(trace.end)
        yield _line("end", {**ending, "logits_digest": trace.end.logits_digest.hex()})


def _line(record: str, values: dict[str, Any]) -> str:
    return json.dumps({"record": record, **values}, ensure_ascii=False)


def _step(step: TraceStep) -> dict[str, Any]:
    values = asdict(step)
    del values["tokens"]
    values["num_neighbours"] = step.num_neighbours
    values["kernel_paths"] = [_path(each) for each in step.kernel_paths]
    return values


def _path(path: KernelPath) -> str:
    return f"{path.op}:{path.path}:{path.unit} x {path.dispatches}"


def perfetto(trace: Trace) -> dict[str, Any]:
    """Return a Chrome trace: steps and the executor's share of them, rows and neighbours."""
    process = {"pid": 1}
    prompt = len(trace.header.prompt_token_ids)
    events: list[dict[str, Any]] = [
        {**process, "ph": "M", "name": "process_name",
         "args": {"name": f"request {trace.header.request_id}"}},
        {**process, "tid": 1, "ph": "M", "name": "thread_name", "args": {"name": "steps"}},
        {**process, "tid": 2, "ph": "M", "name": "thread_name", "args": {"name": "executor"}},
    ]  # fmt: skip
    for step in trace.steps:
        start, duration = step.start_ns / 1000, step.duration_ns / 1000
        kind = "prefill" if step.start_position < prompt else "decode"
        values = _step(step)
        values["tokens"] = [token.token_id for token in step.tokens]
        events.append(
            {**process, "tid": 1, "ph": "X", "name": f"{kind}, step {step.step_id}",
             "ts": start, "dur": duration, "args": values}
        )  # fmt: skip
        inside = min(step.executor_ns, step.duration_ns) / 1000
        events.append(
            {**process, "tid": 2, "ph": "X", "name": f"step {step.step_id}",
             "ts": start + (duration - inside) / 2, "dur": inside}
        )  # fmt: skip
        for name, value in (
            ("rows in the step", step.num_step_tokens), ("neighbours", step.num_neighbours),
        ):  # fmt: skip
            events.append(
                {**process, "ph": "C", "name": name, "ts": start, "args": {"value": value}}
            )
    return {"displayTimeUnit": "ms", "traceEvents": events}
