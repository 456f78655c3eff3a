"""The parts that Program builders share: buffers, and the attention, MLP and head of a decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from executor_service.errors import ModelError
from isobatch_kernels.program import (
    Buffer,
    DenseWeight,
    Embed,
    GateQuantize,
    Linear,
    NormQuantize,
    PagedAttention,
    Program,
    Quantize,
    RopeWriteKV,
    RowStatistics,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor_service.models.checkpoint import Checkpoint, Float32
    from isobatch_kernels.program import Op, Weight

RESIDUAL = "residual"


class ProgramBuilder:
    """Collects ops and buffers of one decoder; methods are called in the order of the data flow."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._config = checkpoint.config
        self._buffers: dict[str, Buffer] = {}
        self._ops: list[Op] = []
        self._names: list[str] = []
        self._unused = {*checkpoint.weights, *checkpoint.vectors}

    def embed(self) -> None:
        """residual = embedding of the token ids."""
        config = self._config
        weight = self._matrix("embed", config.vocab_size, config.hidden_size)
        out = self._rows(RESIDUAL, config.hidden_size)
        self._add("embed", Embed(weight=weight, out=out))

    def attention(self, layer: int, *, bias: bool) -> None:
        """residual += o(attention(q, k, v of norm(residual))).

        `bias` says that q, k and v must have bias vectors; otherwise those in the file are used.
        """
        config = self._config
        prefix = f"layers.{layer}"
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        rows = {"q": query, "k": key, "v": key}
        weights = self._merged(f"{prefix}.qkv", prefix, rows, config.hidden_size)
        x = self._norm(f"{prefix}.attention_norm", "attention_in", weights)
        qkv = self._rows("qkv", query + 2 * key)
        vector = self._bias(prefix, rows, required=bias)
        label = f"{prefix}.attention.qkv"
        self._add(label, Linear(x=x, weights=weights, out=qkv, bias=vector, name=label))
        self._add(f"{prefix}.attention.rope", RopeWriteKV(qkv=qkv, layer=layer))
        context = self._rows("context", query)
        window = config.windows[layer]
        self._add(f"{prefix}.attention", PagedAttention(qkv, layer, context, window))
        output = (self._matrix(f"{prefix}.o", config.hidden_size, query),)
        o_in = self._input("o_in", query, output)
        if self._buffers[o_in].activation_block:
            self._add(f"{prefix}.attention.quantize", Quantize(x=context, out=o_in))
        else:
            o_in = context
        self._project(f"{prefix}.attention.o", o_in, output, f"{prefix}.o")

    def mlp(self, layer: int) -> None:
        """residual += down(silu(gate) * up), of norm(residual)."""
        config = self._config
        prefix = f"layers.{layer}"
        width = config.intermediate_size
        rows = {"gate": width, "up": width}
        weights = self._merged(f"{prefix}.gate_up", prefix, rows, config.hidden_size)
        x = self._norm(f"{prefix}.mlp_norm", "mlp_in", weights)
        gate_up = self._rows("gate_up", 2 * width)
        vector = self._bias(prefix, rows, required=False)
        label = f"{prefix}.mlp.gate_up"
        self._add(label, Linear(x=x, weights=weights, out=gate_up, bias=vector, name=label))
        down = (self._matrix(f"{prefix}.down", config.hidden_size, width),)
        down_in = self._input("down_in", width, down)
        self._add(f"{prefix}.mlp.gate", GateQuantize(gate_up=gate_up, out=down_in))
        self._project(f"{prefix}.mlp.down", down_in, down, f"{prefix}.down")

    def head(self) -> None:
        """logits of the wanted positions, and their statistics."""
        config = self._config
        name = "embed" if config.tied_embeddings else "head"
        weights = (self._matrix(name, config.vocab_size, config.hidden_size),)
        x = self._norm("norm", "head_in", weights, wanted_only=True)
        logits = self._rows("logits", config.vocab_size)
        self._add("head", Linear(x=x, weights=weights, out=logits, wanted_only=True, name="head"))
        self._add("statistics", RowStatistics(logits=logits))

    def build(self) -> Program:
        """Return the Program; raises ModelError when the file holds tensors it does not use."""
        if self._unused:
            raise ModelError(
                f"[model] every tensor must have a place in {self._config.architecture}, "
                f"got {', '.join(sorted(self._unused)[:4])}: {self._checkpoint.source}"
            )
        return Program(
            dimensions=self._config.dimensions(),
            rope=self._config.rope,
            buffers=tuple(self._buffers.values()),
            ops=tuple(self._ops),
            names=tuple(self._names),
        )

    def _matrix(self, name: str, num_outputs: int, num_inputs: int) -> Weight:
        self._unused.discard(name)
        return self._checkpoint.matrix(name, num_outputs, num_inputs)

    def _vector(self, name: str, size: int) -> Float32:
        self._unused.discard(name)
        return self._checkpoint.vector(name, size)

    def _add(self, label: str, op: Op) -> None:
        self._ops.append(op)
        self._names.append(label)

    def _rows(self, name: str, width: int) -> str:
        return self._buffer(Buffer(name, width))

    def _buffer(self, buffer: Buffer) -> str:
        known = self._buffers.setdefault(buffer.name, buffer)
        if known != buffer:
            raise ModelError(f"[model] buffer {buffer.name} must have one shape, got {buffer}")
        return buffer.name

    def _input(self, name: str, width: int, consumers: Sequence[Weight]) -> str:
        """Return a buffer that suits its consumers: fp32 rows, or blocks of 32 or 64 integers.

        Layers may be quantised differently, so a buffer's format is part of its name.
        """
        groups = [weight.group_size for weight in consumers if not isinstance(weight, DenseWeight)]
        if not groups:
            return self._rows(name, width)
        block = 64 if all(group % 64 == 0 for group in groups) else 32
        half_sums = 16 in groups
        suffix = f".{block}h" if half_sums else f".{block}"
        return self._buffer(Buffer(name + suffix, width, block, half_sums))

    def _norm(
        self, vector: str, name: str, consumers: Sequence[Weight], *, wanted_only: bool = False
    ) -> str:
        config = self._config
        out = self._input(name, config.hidden_size, consumers)
        op = NormQuantize(
            x=RESIDUAL,
            weight=self._vector(vector, config.hidden_size),
            epsilon=config.norm_epsilon,
            out=out,
            wanted_only=wanted_only,
        )
        self._add(vector, op)
        return out

    def _merged(
        self, label: str, prefix: str, rows: dict[str, int], num_inputs: int
    ) -> tuple[Weight, ...]:
        """Return matrices of equal K that are one matrix along N; their bits may differ."""
        parts = tuple(
            self._matrix(f"{prefix}.{part}", count, num_inputs) for part, count in rows.items()
        )
        kinds = {part.dtype if isinstance(part, DenseWeight) else "quantised" for part in parts}
        if len(kinds) > 1:
            raise ModelError(
                f"[model] {label} must be all quantised or all of one dense type, "
                f"got {sorted(map(str, kinds))}: {self._checkpoint.source}"
            )
        return parts

    def _bias(self, prefix: str, rows: dict[str, int], *, required: bool) -> Float32 | None:
        """Return the merged bias vector, zeros where a part has none; None when no part has one."""
        names = {part: f"{prefix}.{part}.bias" for part in rows}
        if not required and not any(name in self._checkpoint.vectors for name in names.values()):
            return None
        return np.concatenate(
            [
                self._vector(names[part], count)
                if required or names[part] in self._checkpoint.vectors
                else np.zeros(count, np.float32)
                for part, count in rows.items()
            ]
        )

    def _project(self, label: str, x: str, weights: tuple[Weight, ...], name: str) -> None:
        """residual += weights @ x (+ bias)."""
        bias = self._bias(
            name.rpartition(".")[0],
            {name.rpartition(".")[2]: self._config.hidden_size},
            required=False,
        )
        op = Linear(x=x, weights=weights, out=RESIDUAL, bias=bias, residual=RESIDUAL, name=label)
        self._add(label, op)
