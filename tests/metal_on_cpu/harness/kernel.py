"""`mx.fast.metal_kernel` for numpy arrays: the same signature, run on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from tests.metal_on_cpu.harness.compiler import CompileOptions, build_kernel, load_kernel
from tests.metal_on_cpu.harness.errors import MetalError
from tests.metal_on_cpu.harness.launcher import Binding, LaunchOptions, LaunchStats, launch
from tests.metal_on_cpu.harness.mlx_text import generated_text
from tests.metal_on_cpu.harness.signature import Signature, parse_signature

NumpyArray = npt.NDArray[Any]
_SUFFIXES = ("shape", "strides", "ndim")


class EmulatedKernel:
    """One kernel, callable as MLX's are. `stats` describes the latest call."""

    def __init__(
        self,
        factory: EmulatedKernelFactory,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str,
    ) -> None:
        self._factory = factory
        self.name = name
        self._inputs = list(input_names)
        self._outputs = list(output_names)
        self._source = source
        self._mlx = mx.fast.metal_kernel(
            name=name,
            input_names=self._inputs,
            output_names=self._outputs,
            source=source,
            header=header,
        )
        self._texts: dict[Any, tuple[str, Signature]] = {}
        self._entries: dict[Any, Any] = {}
        self.stats = LaunchStats()

    def text(
        self,
        inputs: Sequence[NumpyArray],
        template: Sequence[tuple[str, Any]] | None,
        output_dtypes: Sequence[Any],
    ) -> tuple[str, Signature]:
        """MLX's text for these arguments, and how to call it."""
        key = (
            tuple((a.dtype.str, a.ndim == 0, a.size < 8) for a in inputs),
            tuple(
                (n, v if isinstance(v, bool | int) else np.dtype(v).name) for n, v in template or ()
            ),
            tuple(np.dtype(d).name for d in output_dtypes),
        )
        if key not in self._texts:
            text = generated_text(
                self._mlx,
                shapes=[a.shape for a in inputs],
                dtypes=[a.dtype for a in inputs],
                template=template,
                output_shapes=[(1,) for _ in output_dtypes],
                output_dtypes=output_dtypes,
            )
            self._texts[key] = (text, parse_signature(text))
        return self._texts[key]

    def __call__(
        self,
        *,
        inputs: Sequence[NumpyArray],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[Any],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
    ) -> list[NumpyArray]:
        """Runs the kernel.

        Outputs start as 0xFF bytes unless `init_value` is given: MLX leaves them undefined.
        """
        arrays = [np.ascontiguousarray(a) for a in inputs]
        if len(arrays) != len(self._inputs):
            raise MetalError(f"[{self.name}] takes {len(self._inputs)} inputs, got {len(arrays)}")
        text, signature = self.text(arrays, template, output_dtypes)
        options = self._factory.compile_options
        if (text, options) not in self._entries:
            program = build_kernel(text, signature, options)
            self._factory.programs.append(program)
            self._factory.texts[text] = signature
            self._entries[text, options] = load_kernel(program)
        outputs = {}
        for name, shape, dtype in zip(self._outputs, output_shapes, output_dtypes, strict=True):
            outputs[name] = np.empty(shape, np.dtype(dtype))
            if init_value is None:
                outputs[name].view(np.uint8).fill(0xFF)
            else:
                outputs[name].fill(init_value)
        named = dict(zip(self._inputs, arrays, strict=True))
        buffers = sorted((p for p in signature.parameters if p.is_buffer), key=lambda p: p.index)
        bindings = [self._bind(p.name, named, outputs) for p in buffers]
        self.stats = launch(
            self._entries[text, options], bindings, grid, threadgroup, self._factory.launch_options
        )
        self._factory.observe(self)
        return [outputs[name] for name in self._outputs]

    @staticmethod
    def _bind(name: str, inputs: dict[str, NumpyArray], outputs: dict[str, NumpyArray]) -> Binding:
        if name in outputs:
            return Binding(name, outputs[name], True)
        if name in inputs:
            return Binding(name, inputs[name], False)
        base, _, suffix = name.rpartition("_")
        if base not in inputs or suffix not in _SUFFIXES:
            raise MetalError(f"[{name}] neither an input nor an output")
        array = inputs[base]
        facts: dict[str, NumpyArray] = {
            "shape": np.array(array.shape, np.int32),
            "strides": np.array([s // array.itemsize for s in array.strides], np.int64),
            "ndim": np.array([array.ndim], np.int32),
        }
        return Binding(name, facts[suffix], False)


class EmulatedKernelFactory:
    """Stands in for `mx.fast.metal_kernel`; its options hold for every kernel it made."""

    def __init__(
        self,
        compile_options: CompileOptions | None = None,
        launch_options: LaunchOptions | None = None,
    ) -> None:
        self.compile_options = compile_options or CompileOptions()
        self.launch_options = launch_options or LaunchOptions()
        self.launches: dict[str, int] = {}
        self.largest: dict[str, LaunchStats] = {}  # by kernel: most threadgroup memory, threads
        self.programs: list[Path] = []  # what was loaded
        self.texts: dict[str, Signature] = {}  # what it was built from

    def __call__(
        self,
        *,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        compile_options: dict[str, str] | None = None,
    ) -> EmulatedKernel:
        """The keyword signature of `mx.fast.metal_kernel`. Only safe math is accepted."""
        if compile_options is not None and compile_options != {"math_mode": "safe"}:
            raise MetalError(f"[{name}] math_mode must be safe, got {compile_options}")
        return EmulatedKernel(self, name, input_names, output_names, source, header)

    def observe(self, kernel: EmulatedKernel) -> None:
        """Keeps counts by kernel name."""
        self.launches[kernel.name] = self.launches.get(kernel.name, 0) + 1
        largest = self.largest.setdefault(kernel.name, LaunchStats())
        stats = kernel.stats
        largest.threadgroup_bytes = max(largest.threadgroup_bytes, stats.threadgroup_bytes)
        largest.threads_per_group = max(largest.threads_per_group, stats.threads_per_group)
