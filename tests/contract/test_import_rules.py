"""Who may import whom, where import-linter's contracts (pyproject.toml) are too coarse to say it.

Read from the source text, so nothing is imported and a lazy import inside a function counts too.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Standard library that the pure packages do without: they have no clock, no environment, no
# threads, no logger, no files and no randomness of their own.
IMPURE = {
    "asyncio", "concurrent", "datetime", "io", "logging", "multiprocessing", "os", "pathlib",
    "queue", "random", "secrets", "select", "signal", "socket", "subprocess", "sys", "tempfile",
    "threading", "time", "urllib", "uuid", "warnings",
}  # fmt: skip
PURE_STDLIB = set(sys.stdlib_module_names) - IMPURE

# The modules in which generated messages may be named: what translates them, and what hands them
# to or takes them from gRPC.
GENERATED_CODE_USERS = (
    "scheduler_service/client/",
    "scheduler_service/executor_client",
    "scheduler_service/server",
    "scheduler_service/servicer",
    "scheduler_service/wire",
    "executor_service/server",
    "executor_service/servicer",
    "executor_service/wire",
)


def modules(folder: str) -> list[Path]:
    """The Python files under `folder`."""
    return sorted((ROOT / folder).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """The full names of the modules that `path` imports at any depth; "" for a relative import."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module if node.level == 0 and node.module else ""


def roots(path: Path) -> set[str]:
    """The top-level names that `path` imports, without its own package's relative imports."""
    return {name.partition(".")[0] for name in imported(path) if name}


def relative(path: Path) -> str:
    """`path` as seen from the repository's root."""
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", modules("scheduler_service/core"), ids=relative)
def test_core_uses_the_pure_standard_library_alone(path: Path) -> None:
    assert roots(path) - PURE_STDLIB <= {"scheduler_service"}
    own = {name for name in imported(path) if name.startswith("scheduler_service")}
    assert all(name.startswith("scheduler_service.core") for name in own)


@pytest.mark.parametrize("path", modules("scheduler_service/sampling"), ids=relative)
def test_sampling_adds_numpy(path: Path) -> None:
    assert roots(path) - PURE_STDLIB <= {"scheduler_service", "numpy"}
    own = {name for name in imported(path) if name.startswith("scheduler_service")}
    assert all(
        name.startswith(("scheduler_service.core", "scheduler_service.sampling")) for name in own
    )


@pytest.mark.parametrize("path", modules("scheduler_service/speculation"), ids=relative)
def test_speculation_uses_the_pure_standard_library_and_the_core(path: Path) -> None:
    assert roots(path) - PURE_STDLIB <= {"scheduler_service"}
    own = {name for name in imported(path) if name.startswith("scheduler_service")}
    assert all(
        name.startswith(("scheduler_service.core", "scheduler_service.speculation")) for name in own
    )


@pytest.mark.parametrize("name", ["model", "compare", "explain", "export"])
def test_what_is_said_of_traces_is_pure(name: str) -> None:
    path = ROOT / "scheduler_service" / "tracing" / f"{name}.py"
    assert roots(path) - PURE_STDLIB <= {"scheduler_service"}
    own = {name for name in imported(path) if name.startswith("scheduler_service")}
    assert all(
        name.startswith(("scheduler_service.tracing.", "scheduler_service.core")) for name in own
    )


@pytest.mark.parametrize("path", modules("scheduler_service/client"), ids=relative)
def test_client_is_grpc_generated_code_and_standard_library(path: Path) -> None:
    allowed = {"scheduler_service", "grpc", "grpc_health", "grpc_status", "google", "isobatch"}
    assert roots(path) - set(sys.stdlib_module_names) <= allowed
    own = {name for name in imported(path) if name.startswith("scheduler_service.")}
    assert all(
        name.startswith(("scheduler_service.client", "scheduler_service.runtime_paths"))
        for name in own
    )


def test_kv_cache_is_numpy_and_plain_values_except_for_its_pages() -> None:
    values = {"isobatch_kernels.program", "isobatch_kernels.step"}
    for path in modules("executor_service/kv_cache"):
        if path.name != "pages.py":
            others = {name for name in imported(path) if not name.startswith("executor_service")}
            outside = {name.partition(".")[0] for name in others - values if name} - PURE_STDLIB
            assert outside <= {"numpy"}, relative(path)


def test_kernels_know_no_service_and_no_contract() -> None:
    for path in modules("kernels/isobatch_kernels"):
        assert not roots(path) & {
            "scheduler_service", "executor_service", "isobatch", "grpc", "google",
        }, relative(path)  # fmt: skip


@pytest.mark.parametrize("service", ["scheduler_service", "executor_service"])
def test_generated_messages_stop_at_the_wire(service: str) -> None:
    for path in modules(service):
        name = relative(path)
        if name.startswith(GENERATED_CODE_USERS):
            continue
        assert "isobatch" not in roots(path), f"{name} must not name generated messages"


def test_importing_the_scheduler_package_imports_nothing() -> None:
    assert roots(ROOT / "scheduler_service" / "__init__.py") == set()


def test_one_module_imports_opentelemetry() -> None:
    """It is an extra: everything else works without it, and pays nothing for it."""
    folders = ("scheduler_service", "executor_service", "kernels")
    users = [
        relative(path) for folder in folders for path in modules(folder)
        if "opentelemetry" in roots(path)
    ]  # fmt: skip
    assert users == ["scheduler_service/otel.py"]
