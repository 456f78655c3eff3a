"""Finds the fastest launch of linear_rows on this chip, for each format of weights and row count.

The sizes never change a bit of a result, so they may be chosen by the clock. Choices are kept on
disk, by chip and by the kernels' text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

from isobatch_kernels.cuda.compiler import cache_folder, keep
from isobatch_kernels.cuda.device import Device, KernelKey
from isobatch_kernels.cuda.launch import Activations, Launcher, rows_constants
from isobatch_kernels.cuda.scratch import Scratch
from isobatch_kernels.cuda.source import device_text, load_kernels
from isobatch_kernels.cuda.tuning import (
    FEW_ROWS,
    ROW_TOPS,
    RowsShape,
    Sizes,
    for_rows,
    rows_candidates,
    rows_top,
)
from isobatch_kernels.cuda.weights import PackedWeight, WeightFormat

_LAUNCHES: Final = 16  # of a graph that is timed
_BYTES: Final = 600e6  # at most so many are read by one graph


@dataclass(frozen=True, slots=True)
class LinearUse:
    """Matrices of one format, whose results are logits or not."""

    weights: tuple[PackedWeight, ...]
    logit: bool


class RowsTimer:
    """Times launches on a device."""

    def __init__(self, device: Device, launcher: Launcher, scratch: Scratch) -> None:
        """Choices go to `launcher.timed`."""
        self._device = device
        self._launcher = launcher
        self._scratch = scratch

    def choose(self, uses: Sequence[LinearUse], most_rows: int) -> None:
        """Chooses for every format and up to `most_rows` rows."""
        tops = [top for top in ROW_TOPS if top <= rows_top(min(most_rows, FEW_ROWS))]
        path = cache_folder() / f"choices-{self._digest()}.json"
        known: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            known = json.loads(path.read_text(encoding="utf-8"))
        open_cases = []
        for use in uses:
            for top in tops:
                form = use.weights[0].format
                kept = known.get(_name(form, top))
                if kept is None:
                    open_cases.append((use, top))
                else:
                    self._launcher.timed[form, top] = RowsShape(
                        **{**kept, "blocks": tuple(kept["blocks"])}
                    )
        if not open_cases:
            return
        self._device.compile([key for case in open_cases for key, _ in self._candidates(*case)])
        for use, top in open_cases:
            form = use.weights[0].format
            timed = [
                (self._seconds(use, top, key, shape), i, shape)
                for i, (key, shape) in enumerate(self._candidates(use, top))
            ]
            if not timed:  # rows too long for shared memory
                continue
            best = min(timed)[2]
            self._launcher.timed[form, top] = best
            known[_name(form, top)] = asdict(best)
        keep(path, json.dumps(known, indent=1).encode())

    def _digest(self) -> str:
        kernel = load_kernels()["linear_rows"]
        text = repr((self._device.name, self._device.chip, device_text(), kernel))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def _candidates(self, use: LinearUse, top: int) -> Iterator[tuple[KernelKey, RowsShape]]:
        weight = use.weights[0]
        sizes = Sizes(weight.tiles, weight.record_words, weight.sub_block, weight.sub_blocks)
        for shape in rows_candidates(top, sizes, self._device.chip):
            constants = {**weight.constants, **rows_constants(shape, logit=use.logit)}
            yield KernelKey("linear_rows", tuple(constants.items()), shape.shared_memory), shape

    def _seconds(self, use: LinearUse, rows: int, key: KernelKey, like: RowsShape) -> float:
        first, device = use.weights[0], self._device
        shape = for_rows(rows, first, like, device.chip)
        padded = -(-rows // 8) * 8
        get = self._scratch.get
        x = Activations(
            q=get("timed integers", 2 * padded * first.num_inputs),
            ds=get("timed sums", 8 * padded * (first.num_inputs // first.sub_block)),
            ds_half=0,
            rows=rows,
            width=first.num_inputs,
            block=first.sub_block,
        )
        y = get("timed results", 4 * padded * first.num_outputs)
        joined = self._launcher.joined(shape, first)
        sizes = (rows, x.width, first.num_outputs, first.num_outputs, x.padded)
        count = max(1, min(_LAUNCHES, int(_BYTES // first.size)))
        device.begin_recording()
        for i in range(count):
            weight = use.weights[i % len(use.weights)]
            arguments = [weight.address, x.q, x.ds, 0, 0, y, *joined, *sizes]
            device.launch(key, shape.blocks, shape.threads, arguments, early=True)
        graph = device.end_recording()
        try:
            return device.seconds(graph) / count
        finally:
            device.drop(graph)


def _name(form: WeightFormat, top: int) -> str:
    values = asdict(form)
    return "-".join(str(values[name]) for name in sorted(values)) + f"-{top}"
