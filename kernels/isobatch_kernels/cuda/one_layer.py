"""One linear layer on a device with memory of its own, for checks and measurements."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from isobatch_kernels.cuda.device import Device
from isobatch_kernels.cuda.launch import Activations, Launcher, Output, Rows
from isobatch_kernels.cuda.scratch import Scratch
from isobatch_kernels.cuda.weights import PackedWeight, pack_quantized
from isobatch_kernels.program import QuantizedWeight
from isobatch_kernels.step import Float32

OP: Final = 3  # index of the quantiser, which flags name
_NO_FLAG: Final = 0xFFFFFFFF


class LinearOnDevice:
    """Quantises rows and multiplies them."""

    def __init__(self, device: Device, weight: QuantizedWeight, block: int, most_rows: int) -> None:
        """Packs the weight; `block` is the activations'."""
        self.device = device
        self._scratch = Scratch(device)
        self.launcher = Launcher(device, self._scratch, 1, 1, 64)
        sub_block = min(weight.group_size, block)
        self.packed: PackedWeight = pack_quantized(device, [weight], sub_block)
        rows, width = -(-most_rows // 8) * 8, weight.num_inputs
        halves = 8 * rows * -(-width // 16) if sub_block < block else 0
        sizes = [4 * rows * width, 2 * rows * width, 8 * rows * -(-width // block), halves]
        sizes += [4 * rows, 4 * rows * weight.num_outputs]
        self._memory = [device.allocate(size) if size else 0 for size in sizes]
        self._block = block

    def activations(self, rows: int) -> Activations:
        """Where quantised rows lie."""
        _, q, ds, ds_half, _, _ = self._memory
        return Activations(q, ds, ds_half, rows, self.packed.num_inputs, self._block)

    def output(self) -> Output:
        """Where results lie."""
        return Output(self._memory[5], self.packed.num_outputs)

    def run(self, x: Float32, *, logit: bool = False) -> tuple[Float32, npt.NDArray[np.uint32]]:
        """Results, and a row's flag: OP + 1 where it is not finite."""
        flags = np.full(len(x), _NO_FLAG, np.uint32)
        self.device.upload(self._memory[0], np.ascontiguousarray(x))
        self.device.upload(self._memory[4], flags)
        activations = self.activations(len(x))
        rows = Rows(self._memory[0], len(x), x.shape[1])
        self.launcher.quantize(rows, activations, self._memory[4], OP)
        self.launcher.linear(activations, self.packed, self.output(), logit=logit)
        self.device.synchronize()
        y = np.empty((len(x), self.packed.num_outputs), np.float32)
        self.device.download(self._memory[5], y)
        self.device.download(self._memory[4], flags)
        return y, flags

    def close(self) -> None:
        """Frees its memory."""
        for address in [*self._memory, self.packed.address]:
            if address:
                self.device.free(address)
        self._scratch.close()
