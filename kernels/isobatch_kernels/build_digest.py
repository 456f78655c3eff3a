"""Names the build of the kernels, for what depends on their speed."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

from isobatch_kernels.cpu_units import UNITS

_FOLDER = Path(__file__).parent


def build_digest(unit: str) -> str:
    """First 16 hex digits of a SHA-256 over what computes on a unit.

    For an instruction set of the CPU that is the native module, for a device the Python files and
    kernel sources of its backend. "unknown" where nothing can be read.
    """
    if unit in UNITS:
        spec = find_spec("isobatch_kernels._cpu")
        files = [] if spec is None or spec.origin is None else [Path(spec.origin)]
    else:
        files = [*_FOLDER.glob("*.py"), *(_FOLDER / unit).glob("*.*")]
    digest = hashlib.sha256()
    num_read = 0
    for path in sorted(files):
        try:
            content = path.read_bytes()
        except OSError:
            continue
        digest.update(f"{path.name}\0{len(content)}\0".encode())
        digest.update(content)
        num_read += 1
    return digest.hexdigest()[:16] if num_read else "unknown"
