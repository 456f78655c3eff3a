"""Finds the fastest launch of linear_rows on this chip, for each format of weights and row count.

The sizes never change a bit of a result, so they may be chosen by the clock. Choices are kept on
disk, by chip and by the kernels' text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Final

from isobatch_kernels.cpu_units import native_module_error
from isobatch_kernels.cuda.compiler import cache_folder, keep
from isobatch_kernels.cuda.device import Device, KernelKey
from isobatch_kernels.cuda.launch import Activations, Choice, Launcher, rows_constants
from isobatch_kernels.cuda.scratch import Scratch
from isobatch_kernels.cuda.source import device_text, load_kernels
from isobatch_kernels.cuda.tuning import (
    ROW_TOPS,
    RowsShape,
    Sizes,
    for_rows,
    ring_variants,
    rows_candidates,
    takes_rows,
)
from isobatch_kernels.cuda.weights import PackedWeight, WeightFormat

_LAUNCHES: Final = 16  # of a graph that is timed
_WITH_OTHER_RINGS: Final = 3
_BYTES: Final = 600e6  # at most so many are read by one graph


@dataclass(frozen=True, slots=True)
class LinearUse:
    """Matrices of one format, whose results are logits or not."""

    weights: tuple[PackedWeight, ...]
    logit: bool


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """What is to be chosen: a launch for up to `top` rows."""

    use: LinearUse
    top: int
    timed: dict[RowsShape, float] = field(default_factory=dict)  # seconds

    def key(self, shape: RowsShape) -> KernelKey:
        """The kernel of a launch."""
        weight = self.use.weights[0]
        constants = {**weight.constants, **rows_constants(shape, logit=self.use.logit)}
        return KernelKey("linear_rows", tuple(constants.items()), shape.shared_memory)

    @property
    def sizes(self) -> Sizes:
        """Of its matrices."""
        weight = self.use.weights[0]
        return Sizes(weight.tiles, weight.record_words, weight.sub_block, weight.sub_blocks)

    @property
    def choice(self) -> Choice:
        """What it is about."""
        return self.use.weights[0].format, self.top, self.use.logit

    def best(self, count: int) -> list[RowsShape]:
        """The fastest so far, at most so many; of equal ones those timed first."""
        return sorted(self.timed, key=self.timed.__getitem__)[:count]


class RowsTimer:
    """Times launches on a device."""

    def __init__(self, device: Device, launcher: Launcher, scratch: Scratch) -> None:
        """Choices go to `launcher.timed`."""
        self._device = device
        self._launcher = launcher
        self._scratch = scratch

    def choose(self, uses: Sequence[LinearUse], most_rows: int) -> None:
        """Chooses for every format and up to `most_rows` rows.

        Raises:
            RuntimeError: what was chosen gives other bits than the contract.
        """
        path = cache_folder() / f"choices-{self._digest()}.json"
        known: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            known = json.loads(path.read_text(encoding="utf-8"))
        open_cases = []
        for use, top in self._uses_by_top(uses, most_rows):
            form = use.weights[0].format
            kept = known.get(_name(form, top))
            if kept is None:
                open_cases.append(Case(use, top))
            else:
                shape = RowsShape(**{**kept, "blocks": tuple(kept["blocks"])})
                self._launcher.timed[form, top] = shape
        if not open_cases:
            return
        self.measure(open_cases)
        # None is best where rows are too long for shared memory.
        chosen = {case.choice: best for case in open_cases for best in case.best(1)}
        for difference in _differences(self._device, chosen):
            raise RuntimeError(f"[cuda] a chosen launch must equal the contract, got {difference}")
        for (form, top, _), best in chosen.items():
            self._launcher.timed[form, top] = best
            known[_name(form, top)] = asdict(best)
        keep(path, json.dumps(known, indent=1).encode())

    def measure(self, cases: Sequence[Case]) -> None:
        """Times what is worth it, and leaves the seconds with the cases."""
        chip = self._device.chip
        self._time({c: rows_candidates(c.top, c.sizes, chip) for c in cases})
        # Rings matter less, and only where the rest is good.
        self._time(
            {
                case: [
                    variant
                    for like in case.best(_WITH_OTHER_RINGS)
                    for variant in ring_variants(case.top, case.sizes, chip, like)
                ]
                for case in cases
            }
        )

    def _uses_by_top(
        self, uses: Sequence[LinearUse], most_rows: int
    ) -> Iterator[tuple[LinearUse, int]]:
        for use in uses:
            for fewer, top in pairwise((0, *ROW_TOPS)):
                if fewer < most_rows and takes_rows(top, use.weights[0], self._device.chip):
                    yield use, top

    def _time(self, shapes: Mapping[Case, Sequence[RowsShape]]) -> None:
        """All are compiled first, several at a time."""
        self._device.compile([case.key(shape) for case, some in shapes.items() for shape in some])
        for case, some in shapes.items():
            for shape in some:
                case.timed[shape] = self._seconds(case.use, case.top, case.key(shape), shape)

    def _digest(self) -> str:
        kernel = load_kernels()["linear_rows"]
        text = repr((self._device.name, self._device.chip, device_text(), kernel))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

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


def _differences(device: Device, chosen: Mapping[Choice, RowsShape]) -> Iterator[str]:
    """Where what was chosen gives other bits than the reference, if that is here."""
    if native_module_error() is not None:
        return iter(())
    from isobatch_kernels.cuda.self_test import chosen_differences  # needs the native module

    return chosen_differences(device, chosen)


def _name(form: WeightFormat, top: int) -> str:
    values = asdict(form)
    return "-".join(str(values[name]) for name in sorted(values)) + f"-{top}"
