"""A program under a float kernel policy: fp32 rows instead of block integers."""

from __future__ import annotations

import dataclasses
from typing import Final

from isobatch_kernels.kernel_policy import EXACT, KernelPolicy
from isobatch_kernels.program import Buffer, Linear, Op, Program, Quantize

# The fields by which ops name buffers.
_BUFFER_FIELDS: Final = ("x", "out", "residual", "qkv", "gate_up", "logits")


def apply_policy(program: Program, policy: KernelPolicy) -> Program:
    """Return the program with every linear layer under `policy`.

    Float policies read fp32 rows, so quantised buffers become rows, and the ops that only
    quantise go away: their readers read what they read.
    """
    if policy.is_exact:
        return program
    names = program.names or tuple("" for _ in program.ops)
    ops: list[Op] = []
    kept_names: list[str] = []
    rows_of: dict[str, str] = {}  # by quantised buffer: the rows that it would be made of
    for op, name in zip(program.ops, names, strict=True):
        if isinstance(op, Quantize):
            rows_of[op.out] = op.x
            continue
        if isinstance(op, Linear):
            rows = policy.threshold_rows if policy.name == "threshold" else 0
            x = rows_of.get(op.x, op.x)
            op = dataclasses.replace(op, x=x, policy=policy.name, threshold_rows=rows)
        written = getattr(op, "out", None)
        rows_of = {out: x for out, x in rows_of.items() if written not in (out, x)}
        ops.append(op)
        kept_names.append(name)
    used = {getattr(op, field, None) for op in ops for field in _BUFFER_FIELDS}
    return dataclasses.replace(
        program,
        buffers=tuple(
            Buffer(each.name, each.width) for each in program.buffers if each.name in used
        ),
        ops=tuple(ops),
        names=tuple(kept_names) if program.names else (),
    )


def policy_of(program: Program) -> str:
    """Return the one policy of a program's linear layers; `exact` where it has none.

    Raises ValueError where they differ: a step has one numeric class.
    """
    found = {op.policy for op in program.ops if isinstance(op, Linear)}
    if len(found) > 1:
        raise ValueError(f"[policy] linear layers must share one policy, got {sorted(found)}")
    return found.pop() if found else EXACT
