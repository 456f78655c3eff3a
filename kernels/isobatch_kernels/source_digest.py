"""Whether the native module was built from the sources that lie beside it.

The build runs this file and compiles the digest of its sources in; a process that starts compares.
An installed wheel has no sources, so there is nothing to compare. Standard library only, because
the build has nothing else.

Usage, by the build: python source_digest.py FILE.cpp
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

_FOLDER = Path(__file__).parent
_BUILD_FILES = ("CMakeLists.txt", "sources.cmake")


def source_digest(folder: Path = _FOLDER) -> str:
    """First 16 hex digits of a SHA-256 over the native module's sources; empty without any.

    `folder` is that of the package, whose parent holds the files of the build.
    """
    sources = sorted((*folder.glob("cpp/*.cpp"), *folder.glob("cpp/*.h")))
    if not sources:
        return ""
    digest = hashlib.sha256()
    for path in (*sources, *(folder.parent / name for name in _BUILD_FILES)):
        content = path.read_bytes() if path.exists() else b""
        digest.update(f"{path.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def staleness() -> str:
    """Return what is wrong with the native module's age, and what to run; empty where nothing is.

    Costs a few milliseconds: some hundred kilobytes are read.
    """
    expected = source_digest()
    if not expected:
        return ""
    try:
        from isobatch_kernels import _cpu
    except ImportError:
        return ""  # whoever needs it says so
    built = getattr(_cpu, "source_digest", "none")
    if built == expected:
        return ""
    return (
        f"[kernels] the native module must be built from the sources beside it ({expected}), got "
        f"one of {built}: run `make setup` in {_FOLDER.parent.parent}"
    )


def main() -> None:
    """Write the C++ file that holds the digest."""
    Path(sys.argv[1]).write_text(
        f"namespace isobatch {{\nextern const char source_digest[];\n"
        f'const char source_digest[] = "{source_digest()}";\n}}\n'
    )


if __name__ == "__main__":
    main()
