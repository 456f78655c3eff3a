"""What can be wrong on the executor's side, looked at without starting it.

Usage: python -m executor_service.doctor [flags of the executor]

Prints a JSON list of {name, state, detail, advice}; `state` is ok, warning or failed. The exit code
is 0 whatever it finds. `isobatch doctor` shows the list with its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from executor_service import config
from executor_service.engine.capabilities import package_version
from executor_service.errors import ExecutorError, StartError
from executor_service.models.registry import ALIASES, expanded, is_meant_as_path, locate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OK: Final = "ok"
WARNING: Final = "warning"
FAILED: Final = "failed"
SPEED: Final = "speed"
_SPEED_NEEDS: Final = ("mlx", "backend", "unit", "model", "memory")
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Check:
    """One finding."""

    name: str
    state: str
    detail: str
    advice: str = ""


def check_mlx() -> list[Check]:
    """Import MLX, which reads model files and drives Apple's GPU."""
    try:
        import mlx.core as mx
    except ImportError as error:
        return [
            Check("mlx", FAILED, str(error), "Reinstall isobatch; macOS 14 or newer is needed.")
        ]
    is_metal = mx.metal.is_available()
    found = [Check("mlx", OK, f"{package_version('mlx')}, Metal {'yes' if is_metal else 'no'}")]
    if sys.platform == "darwin" and not is_metal:
        found.append(
            Check(
                "metal", WARNING, "MLX sees no GPU", "Run natively, not under Rosetta or in a VM."
            )
        )
    return found


def check_kernels(backend: str, unit: str) -> list[Check]:
    """Load the native module and compare every unit of this machine with the reference."""
    from isobatch_kernels.dispatch import FAST_UNITS, available_units, backend_error, choose_unit
    from isobatch_kernels.source_digest import staleness

    missing = backend_error(backend, unit)
    if missing is not None:
        advice = "Set `backend` to auto, or reinstall isobatch with a C++ compiler"
        return [Check("backend", FAILED, missing, f"{advice} (Mac: xcode-select --install).")]
    try:
        from isobatch_kernels.self_test import NUM_CASES, first_difference
    except ImportError as error:
        advice = "The GPU computes; a C++ compiler when isobatch is installed adds the CPU."
        return [Check("native module", WARNING, str(error), advice)]
    units = available_units()
    found = [Check("native module", OK, f"units {', '.join(units)}")]
    if words := staleness():
        found = [Check("native module", WARNING, words, "make setup")]
    tested = [each for each in FAST_UNITS if each in units]
    differences = {each: first_difference(each) for each in tested}
    wrong = {each: where for each, where in differences.items() if where is not None}
    if wrong:
        words = "; ".join(f"{each}: {where}" for each, where in wrong.items())
        found.append(Check("self-test", WARNING, words, "A slower unit is used; please report it."))
    else:
        cases = NUM_CASES * len(tested)
        found.append(Check("self-test", OK, f"{cases} cases equal on {', '.join(tested)}"))
    try:
        found.append(Check("unit", OK, choose_unit(unit)))
    except (ValueError, RuntimeError) as error:
        found.append(Check("unit", FAILED, str(error), "Set `unit` to auto."))
    return found


def check_model(settings: config.ExecutorConfig) -> list[Check]:
    """Find the model's files and compare their size with the memory that is free."""
    try:
        location = locate(settings.model, settings.model_id or None)
        size = _model_bytes(location.path)
    except (ExecutorError, StartError, OSError) as error:
        return [Check("model", FAILED, str(error), _model_advice(settings.model))]
    free = psutil.virtual_memory().available
    words = f"{location.path.name}: {size / _MIB:,.0f} MiB, {free / _MIB:,.0f} MiB of memory free"
    found = [Check("model", OK, f"{settings.model} at {location.path}")]
    # Weights are held once more in the kernels' own layout while they load.
    if free < 2 * size + settings.kv_memory_mb * _MIB:
        advice = "Close other programs, or take a smaller model or cache (kv_memory_mb)."
        found.append(Check("memory", WARNING, words, advice))
    else:
        found.append(Check("memory", OK, words))
    return found


def _model_advice(name: str) -> str:
    is_path = is_meant_as_path(name) or expanded(name).exists()
    if is_path or not (name in ALIASES or "/" in name):
        return "Set `model` to a whole model that is there, an alias, or a repository id."
    return f"isobatch pull {name}"


def _model_bytes(path: Path) -> int:
    """Return the size of a model's weights; raises ModelError for a header that is damaged."""
    from executor_service.models import gguf_header, safetensors_header
    from executor_service.models.files import mapped

    is_file = path.is_file()
    weights = [path] if is_file else sorted(path.glob("*.safetensors"))
    read = gguf_header.read_header if is_file else safetensors_header.read_header
    for each in weights:
        with mapped(each) as data:
            read(data, str(each))
    return sum(each.stat().st_size for each in weights)


def check_speed(settings: config.ExecutorConfig) -> list[Check]:
    """Compare throughput with the stored profile: by a running executor's last check, else now."""
    if settings.profile == "off":
        return [Check(SPEED, OK, "profiles are turned off")]
    page = _metrics_page(settings.metrics_port)
    if page is not None:
        return [_speed_of_page(page)]
    from executor_service.engine.engine import build_engine
    from executor_service.engine.kernels import create_backend, self_test_of

    location = locate(settings.model, settings.model_id or None)
    self_test = self_test_of(settings.backend, settings.unit)
    engine = build_engine(settings, location, create_backend, self_test, may_measure=False)
    try:
        result = engine.speed.run()
    finally:
        engine.close()
    if result is None:
        return [Check(SPEED, OK, "no stored profile yet: the executor measures at its next start")]
    return [_speed(dict(result.ratios), engine.capabilities.build.unit, "now")]


def _metrics_page(port: int) -> str | None:
    """Return the metrics of a running executor; None where none answers."""
    if not port:
        return None
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            text: str = reply.read().decode("utf-8", "replace")
    except (OSError, ValueError):
        return None
    return text if "isobatch_executor_build_info" in text else None


def _speed_of_page(page: str) -> Check:
    from prometheus_client.parser import text_string_to_metric_families

    ratios: dict[int, float] = {}
    checked_at, unit, has_profile = 0.0, "", False
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            match sample.name:
                case "isobatch_executor_speed_ratio":
                    ratios[int(sample.labels["rows"])] = sample.value
                case "isobatch_executor_speed_check_timestamp_seconds":
                    checked_at = sample.value
                case "isobatch_executor_profile_measured_timestamp_seconds":
                    has_profile = sample.value > 0
                case "isobatch_executor_build_info":
                    unit = sample.labels["unit"]
    if not has_profile:
        return Check(SPEED, OK, "the running executor has no profile")
    if not checked_at:
        return Check(SPEED, OK, "the running executor has not been idle long enough for a check")
    minutes = max(0.0, time.time() - checked_at) / 60
    return _speed(ratios, unit, f"of the running executor, {minutes:.0f} min ago")


def _speed(ratios: dict[int, float], unit: str, when: str) -> Check:
    from executor_service.engine.speed_check import SLOW, likely_cause
    from isobatch_kernels.dispatch import DEVICES

    words = ", ".join(
        f"{ratio:.0%} at {rows} {'row' if rows == 1 else 'rows'}"
        for rows, ratio in sorted(ratios.items())
    )
    detail = f"throughput over that of the stored profile, {when}: {words}"
    if min(ratios.values()) < SLOW:
        # A processor is often busy with something else, which is no fault of the installation.
        state = FAILED if unit in DEVICES else WARNING
        return Check(SPEED, state, detail, likely_cause(unit))
    return Check(SPEED, OK, detail)


def run(arguments: Sequence[str]) -> list[Check]:
    """Do every check; one that itself fails is a finding."""
    try:
        settings = config.load(arguments, os.environ)
    except StartError as error:
        advice = "isobatch config show --origin"
        return [Check("executor configuration", FAILED, str(error), advice)]
    found = [
        Check(
            "executor configuration",
            OK,
            f"model {settings.model}, backend {settings.backend}, unit {settings.unit}",
        )
    ]
    checks: dict[str, Callable[[], list[Check]]] = {
        "mlx": check_mlx,
        "native module": lambda: check_kernels(settings.backend, settings.unit),
        "model": lambda: check_model(settings),
    }
    for name, check in checks.items():
        try:
            found += check()
        except Exception as error:  # a check that breaks is what its user looks for
            found.append(Check(name, FAILED, f"{type(error).__name__}: {error}"))
    # Loading the model is worth trying only where nothing else is wrong.
    if all(each.state == OK for each in found if each.name in _SPEED_NEEDS):
        try:
            found += check_speed(settings)
        except Exception as error:
            found.append(Check(SPEED, FAILED, f"{type(error).__name__}: {error}"))
    return found


if __name__ == "__main__":
    print(json.dumps([asdict(each) for each in run(sys.argv[1:])]))
