"""Writes protos/gen from protos/isobatch, or with --check tells whether it is up to date.

The one way to regenerate. Messages and their stubs come from protoc, services from the gRPC plugin,
the stubs of services from mypy-protobuf. Run by `make protos` in an environment of its own,
because grpcio-tools wants an older protobuf than the services run on (requirements/protos.in).
"""

import argparse
import os
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

SOURCE = Path(__file__).resolve().parent
GENERATED = SOURCE / "gen"


def generate(target: Path) -> None:
    """Write the code of every .proto file under `target`.

    Raises:
        SystemExit: the compiler refused a file; its message is on standard error.
    """
    target.mkdir(parents=True, exist_ok=True)
    protos = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.glob("isobatch/**/*.proto"))
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={SOURCE}",
            f"--proto_path={files('grpc_tools') / '_proto'}",
            f"--python_out={target}",
            f"--pyi_out={target}",
            f"--grpc_python_out={target}",
            f"--mypy_grpc_out=quiet:{target}",
            *protos,
        ]
    )
    if status:
        raise SystemExit(status)
    (target / "isobatch" / "py.typed").touch()


def contents(root: Path) -> dict[str, bytes]:
    """Every file under `root` by its relative path, without caches."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def differences(fresh: dict[str, bytes], present: dict[str, bytes]) -> list[str]:
    """The names of files that are missing, left over or out of date in `present`."""
    return sorted(
        name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name)
    )


def main(arguments: list[str]) -> int:
    """Generate in place, or with --check compare and change nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, only compare")
    options = parser.parse_args(arguments)
    # protoc finds the mypy-protobuf plugin on PATH, beside this interpreter.
    os.environ["PATH"] = str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"]
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = contents(Path(folder))
    stale = differences(fresh, contents(GENERATED))
    if options.check:
        for name in stale:
            print(f"[protos] protos/gen/{name} is out of date; run: make protos", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        path = GENERATED / name
        if name in fresh:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(fresh[name])
        else:
            path.unlink()
        print(f"protos/gen/{name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
