"""Times linear layers one by one: which kernel and tile does each shape of this model want here?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from isobatch_kernels.metal import linear as lin
from isobatch_kernels.metal.activations import ActivationLayout, Activations
from isobatch_kernels.metal.launch import MINIMUM
from isobatch_kernels.metal.linear_profile import Choice, Way
from isobatch_kernels.program import Linear

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from isobatch_kernels.metal.launch import Launcher
    from isobatch_kernels.metal.linear_profile import LinearProfile
    from isobatch_kernels.metal.model import DeviceModel

REPEATS = 3
# Weights of so many layers take turns, or they would stay in the GPU's last cache.
_MOST_LAYERS = 4
# What another way must gain over the default of the row count.
_GAIN = 0.03


@dataclass(frozen=True, slots=True)
class _Layer:
    """A quantised matrix and how a step uses it."""

    weight: lin.DeviceWeight
    layout: ActivationLayout
    epilogue: lin.Epilogue
    has_residual: bool


def layers_by_shape(model: DeviceModel) -> Mapping[str, list[_Layer]]:
    """A few layers of every shape."""
    found: dict[str, list[_Layer]] = {}
    for index, op in enumerate(model.program.ops):
        if not isinstance(op, Linear) or op.x not in model.layouts:
            continue
        layer = model.linears[index]
        for part, bias in zip(layer.parts, layer.biases, strict=True):
            if isinstance(part, lin.DeviceWeight):
                same = found.setdefault(part.shape, [])
                if len(same) < _MOST_LAYERS:
                    epilogue = lin.Epilogue(bias, None, op.wanted_only)
                    has_residual = op.residual is not None
                    same.append(_Layer(part, model.layouts[op.x], epilogue, has_residual))
    return found


def time_way(
    launcher: Launcher, layers: list[_Layer], way: Way, rows: int, clock: Callable[[], int]
) -> int:
    """Least nanoseconds of one run over the layers, of a few; the first does not count."""
    arrays = launcher.arrays
    prepared = []
    for layer in layers:
        layout = layer.layout
        sums = rows * layout.blocks * (layout.block // layout.sum_block)
        x = Activations(
            arrays.zeros((rows, layout.blocks * layout.block), "float16"),
            arrays.zeros((max(MINIMUM, rows * layout.blocks),), "float32"),
            arrays.zeros((max(MINIMUM, sums),), "float32"),
            rows,
            layout,
        )
        residual = None
        if layer.has_residual:
            residual = arrays.zeros((rows, layer.weight.host.num_outputs), "float32")
        epilogue = lin.Epilogue(layer.epilogue.bias, residual, layer.epilogue.is_logit)
        arrays.wait(x.q, x.d, x.s, *([] if residual is None else [residual]))
        prepared.append((x, layer.weight, epilogue))
    times = []
    for _ in range(REPEATS + 1):
        begin = clock()
        arrays.wait(
            *(lin.quantized_linear(launcher, *way, x, w, after) for x, w, after in prepared)
        )
        times.append(clock() - begin)
    return min(times[1:])


def fastest_choice(
    launcher: Launcher,
    model: DeviceModel,
    profile: LinearProfile,
    rows: int,
    clock: Callable[[], int],
) -> str:
    """The choice in which every shape has the way that was fastest for it alone."""
    ways = profile.ways(rows)
    own: list[tuple[str, Way]] = []
    for shape, layers in layers_by_shape(model).items():
        times = {way: time_way(launcher, layers, way, rows, clock) for way in ways}
        best = min(ways, key=lambda way: times[way])
        if times[best] < times[ways[0]] * (1 - _GAIN):
            own.append((shape, best))
    return str(Choice(ways[0], tuple(own)))
