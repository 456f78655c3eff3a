"""Kernel paths of the contract's enums by their names, as the executor's metrics write them."""

import functools
from typing import Any

from isobatch.executor.v1 import token_rows_pb2 as pb
from scheduler_service.tracing.model import KernelPath

_OPS = {value: name.removeprefix("KERNEL_OP_").lower() for name, value in pb.KernelOp.items()}
_PATHS = {value: name.removeprefix("KERNEL_PATH_").lower() for name, value in pb.KernelPath.items()}
_UNITS = {value: name.removeprefix("KERNEL_UNIT_").lower() for name, value in pb.KernelUnit.items()}


def read_path(message: pb.KernelPathCount) -> KernelPath:
    """Return a kernel path; a number that this version does not know becomes its own name."""
    return _path(message.op, message.path, message.unit, message.dispatches)


# They are few, and the same from step to step.
@functools.lru_cache(maxsize=512)
def _path(op: int, path: int, unit: int, dispatches: int) -> KernelPath:
    return KernelPath(
        _OPS.get(op, str(op)), _PATHS.get(path, str(path)), _UNITS.get(unit, str(unit)), dispatches
    )


def path_message(value: KernelPath) -> pb.KernelPathCount:
    """Return a kernel path as a message, without its rows."""
    return pb.KernelPathCount(
        op=_number(pb.KernelOp.items(), "KERNEL_OP_", value.op),
        path=_number(pb.KernelPath.items(), "KERNEL_PATH_", value.path),
        unit=_number(pb.KernelUnit.items(), "KERNEL_UNIT_", value.unit),
        dispatches=value.dispatches,
    )


def _number(items: list[tuple[str, int]], prefix: str, name: str) -> Any:
    return int(name) if name.isdigit() else dict(items)[prefix + name.upper()]
