"""How many bytes of weights a step reads, for the account of memory bandwidth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from isobatch_kernels.program import Linear, QuantizedWeight

if TYPE_CHECKING:
    from isobatch_kernels.program import Program, Weight


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of the linear layers' weights as stored, each weight once."""

    # Read in every step that computes a row.
    every_step: int
    # Read besides when a row's logits are wanted.
    logits: int

    def of_step(self, *, has_wanted: bool) -> int:
        """Return the bytes that one step has to read at least."""
        return self.every_step + (self.logits if has_wanted else 0)


def weight_bytes(program: Program) -> WeightBytes:
    """Add up the linear layers of a Program; embeddings are looked up and not read as a whole."""
    linears = [op for op in program.ops if isinstance(op, Linear)]
    sums = {
        wanted_only: sum(
            _stored(weight)
            for op in linears
            if op.wanted_only is wanted_only
            for weight in op.weights
        )
        for wanted_only in (False, True)
    }
    return WeightBytes(every_step=sums[False], logits=sums[True])


def _stored(weight: Weight) -> int:
    if isinstance(weight, QuantizedWeight):
        arrays = (weight.packed, weight.scales, weight.biases)
        return sum(int(each.nbytes) for each in arrays if each is not None)
    return int(weight.values.nbytes)
