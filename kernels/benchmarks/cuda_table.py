"""The linear kernels alone, on weights that are not in the cache, against MLX's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np

from isobatch_kernels.cuda.launch import Activations, Launcher
from isobatch_kernels.cuda.weights import PackedWeight, pack_quantized
from isobatch_kernels.program import QuantizedWeight

ROWS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 512)
_COLD_BYTES: Final = 250e6
_COPY: Final = """
size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
size_t step = (size_t)gridDim.x * blockDim.x;
for (; i < (size_t)from_shape[0] * from_shape[1] / 4; i += 4 * step) {
  uint4 v[4];
  for (int k = 0; k < 4; k++) v[k] = reinterpret_cast<const uint4*>(from)[i + k * step];
  for (int k = 0; k < 4; k++) reinterpret_cast<uint4*>(to)[i + k * step] = v[k];
}
"""


def copy_bandwidth() -> float:
    """GB/s of a copy of 4 GiB by a kernel of our own, bytes read and written both counted."""
    # MLX's types call a kernel `object`.
    kernel: Any = mx.fast.cuda_kernel(
        name="copy", input_names=["from"], output_names=["to"], source=_COPY
    )
    source = mx.random.randint(0, 2**30, (1 << 14, 1 << 16)).astype(mx.uint32)
    mx.eval(source)
    best = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        out = kernel(
            inputs=[source],
            grid=(1 << 20, 1, 1),
            threadgroup=(256, 1, 1),
            output_shapes=[source.shape],
            output_dtypes=[source.dtype],
        )
        mx.eval(out)
        best = min(best, time.perf_counter() - start)
        del out
    return 2 * source.nbytes / best / 1e9


def _seconds(call: Callable[[int], mx.array], count: int) -> float:
    """Seconds of one call where `count` different ones are launched from one traced function."""

    def many(start: mx.array) -> list[mx.array]:
        return [start, *(call(i) for i in range(count))]

    traced = mx.compile(many)
    times = []
    for _ in range(4):
        start = mx.array(0)
        mx.eval(start)
        begin = time.perf_counter()
        mx.eval(traced(start))
        times.append(time.perf_counter() - begin)
    return min(times[1:]) / count


def _random_weights(inputs: int, outputs: int) -> list[QuantizedWeight]:
    count = max(3, int(_COLD_BYTES / (inputs * outputs * 0.5625)))
    weights = []
    for _ in range(min(count, 24)):
        values = mx.random.normal((outputs, inputs)).astype(mx.float16) * 0.02
        packed, scales, biases = mx.quantize(values, group_size=64, bits=4)
        mx.eval(packed, scales, biases)
        weights.append(QuantizedWeight(packed, scales, biases, 4, 64))  # type: ignore[arg-type]
    return weights


def _activations(launcher: Launcher, x: mx.array) -> Activations:
    flags = mx.zeros((x.shape[0],), dtype=mx.uint32)
    out = launcher.quantize(x, 64, False, flags, 1)
    mx.eval(out.q, out.ds)
    return out


def measure_linear(inputs: int, outputs: int, rows: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Microseconds of one launch by rows, and elements of row 0 that are not those of 1 row."""
    launcher = Launcher(4, 4, 64)
    sources = _random_weights(inputs, outputs)
    packed: list[PackedWeight] = [pack_quantized([source], 64) for source in sources]
    x = mx.random.normal((max(rows), inputs))
    half = x.astype(mx.float16)
    first: tuple[Any, Any] | None = None
    for count in rows:
        launches = int(np.clip(2e9 / (inputs * outputs), 24, 240)) if count <= 64 else 24
        activations = _activations(launcher, x[:count])
        # A copy for each launch: mx.compile would merge equal ones.
        some = [half[:count] + 0 for _ in range(launches)]
        mx.eval(some)

        def ours(i: int, a: Activations = activations) -> mx.array:
            return launcher.linear(a, packed[i % len(packed)], None, None)

        def theirs(i: int, a: list[mx.array] = some) -> mx.array:
            w: Any = sources[i % len(sources)]
            return mx.quantized_matmul(
                a[i], w.packed, w.scales, w.biases, transpose=True, group_size=64, bits=4
            )

        times = [(_seconds(ours, launches), _seconds(theirs, launches)) for _ in range(2)]
        row = np.array(ours(0))[0], np.array(theirs(0))[0]
        first = first or row
        yield {
            "inputs": inputs,
            "outputs": outputs,
            "rows": count,
            "ours_us": [round(a * 1e6, 1) for a, _ in times],
            "mlx_us": [round(b * 1e6, 1) for _, b in times],
            "ours_gb_s": round(inputs * outputs * 0.5625e-9 / min(a for a, _ in times)),
            "ours_differing": int((row[0] != first[0]).sum()),
            "mlx_differing": int((row[1] != first[1]).sum()),
        }
