"""Whether anybody asked for spans, and where they go."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from scheduler_service import logs
from scheduler_service.errors import ConfigurationError
from scheduler_service.spans import Spans

_LOG = logs.get_logger(__name__)
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def open_spans(
    endpoint: str,
    step_every: int,
    version: str,
    clock: Callable[[], float],
    environ: Mapping[str, str],
) -> Spans | None:
    """Return spans that go to a collector, or None where none is named.

    Args:
        endpoint: Address of the collector; empty takes OpenTelemetry's own variables.
        step_every: Each how many steps one becomes a span; 0 for none.
        version: Of this service, for the resource.
        clock: Monotonic seconds.
        environ: Environment variables.

    Raises:
        ConfigurationError: An endpoint is set and the extra is not installed. The variables,
            which may be meant for other programs, give a warning instead.
    """
    if not endpoint and not _is_asked_for(environ):
        return None
    try:
        from scheduler_service import otel
    except ImportError as error:
        words = (
            "[tracing] otlp_endpoint needs the extra: pip install 'isobatch[otel]', "
            f"got no module {error.name}"
        )
        if endpoint:
            raise ConfigurationError(words) from error
        _LOG.warning("tracing_off", reason=words)
        return None
    return otel.exporting_spans(endpoint, step_every, version, clock)


def _is_asked_for(environ: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry's variables name a collector that takes what we send."""
    if environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return False
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if not any(environ.get(name) for name in _ENDPOINT_VARIABLES):
        return False
    protocol = next((environ[name] for name in _PROTOCOL_VARIABLES if environ.get(name)), "grpc")
    if protocol != "grpc":
        _LOG.warning("tracing_off", reason=f"[tracing] the protocol must be grpc, got {protocol}")
        return False
    return True
