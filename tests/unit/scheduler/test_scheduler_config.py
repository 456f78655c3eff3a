"""Flags, variables, defaults, and what is refused."""

import dataclasses

import pytest

from scheduler_service import config
from scheduler_service.config import SchedulerConfig
from scheduler_service.errors import ConfigurationError

ENVIRON = {"XDG_RUNTIME_DIR": "/run/user/1"}


def test_defaults_are_the_runtime_directory() -> None:
    settings = config.load([], ENVIRON)
    assert settings.listen == "unix:/run/user/1/isobatch/scheduler.sock"
    assert settings.executor == "unix:/run/user/1/isobatch/executor.sock"
    assert settings.metrics_port == 9400
    assert settings.reflection


def test_flags_win_over_variables_and_these_over_defaults() -> None:
    environ = ENVIRON | {
        "ISOBATCH_SCHEDULER_MAX_NUM_SEQS": "7",
        "ISOBATCH_SCHEDULER_METRICS_PORT": "1234",
        "ISOBATCH_SCHEDULER_REFLECTION": "false",
    }
    settings = config.load(["--max-num-seqs", "9", "--recovery-deadline", "1.5"], environ)
    assert settings.max_num_seqs == 9
    assert settings.metrics_port == 1234
    assert settings.recovery_deadline_seconds == 1.5
    assert not settings.reflection


def test_every_field_has_a_flag() -> None:
    values = {
        "listen": "unix:/a/s.sock", "executor": "127.0.0.1:9", "metrics_port": "0",
        "max_num_seqs": "3", "max_num_batched_tokens": "5", "max_prefill_chunk": "2",
        "max_num_waiting": "4", "recovery_deadline_seconds": "2.0", "drain_seconds": "1.0",
        "step_timeout_seconds": "3.0", "log_level": "error", "log_format": "json",
        "max_step_ms": "25.0",
        "reflection": "false", "log_file": "/x/s.log", "log_prompts": "false", "trace_dir": "/x/t",
        "trace_dir_mb": "7",
        "metrics_exemplars": "true", "otlp_endpoint": "http://h:4317", "otlp_step_every": "9",
            "max_waiting_tokens": "77", "aging_seconds": "2.5", "max_undelivered_tokens": "6",
            "slow_reader_seconds": "1.5",
        "lookahead": "off", "speculation": "auto", "max_draft_tokens": "5",
        "fixed_draft_tokens": "3",
    }  # fmt: skip
    assert set(values) == {each.name for each in dataclasses.fields(SchedulerConfig)}
    flags = [part for n, v in values.items() for part in (f"--{n.replace('_', '-')}", v)]
    settings = config.load(flags, {})
    assert {n: str(getattr(settings, n)) for n in values} == values | {
        "reflection": "False", "log_prompts": "False", "metrics_exemplars": "True",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-num-seqs", "0"], "max_num_seqs must be at least 1, got 0"),
        (["--max-num-waiting", "0"], "max_num_waiting must be at least 1, got 0"),
        (["--metrics-port", "70000"], "metrics_port must be in"),
        (["--metrics-port", "many"], "invalid int value"),
        (["--recovery-deadline", "nan"], "recovery_deadline_seconds must be a finite"),
        (["--max-step-ms", "-1"], "max_step_ms must be a finite number at least 0"),
        (["--step-timeout", "0"], "step_timeout_seconds must be a finite number above 0"),
        (["--aging-seconds", "1e-320"], "aging_seconds must be a finite number at least 0.001"),
        (["--log-level", "loud"], "must be one of debug, info"),
        (["--log-format", "xml"], "must be one of console, json"),
        (["--reflection", "maybe"], "must be true or false"),
        (["--unknown"], "unrecognized arguments"),
        (["--max-num", "3"], "unrecognized arguments"),
        (["--listen", "0.0.0.0:50051"], "must be a loopback address unless TLS"),
        (["--listen", "example.org:80"], "must be a loopback address unless TLS"),
        (["--listen", "127.0.0.1"], "must be unix:PATH or HOST:PORT"),
        (["--listen", "127.0.0.1:99999"], "must be unix:PATH or HOST:PORT"),
        (["--listen", "127.0.0.1:\u0663"], "must be unix:PATH or HOST:PORT"),
        (["--listen", "unix:relative.sock"], "must name an absolute socket path"),
        (
            ["--listen", f"unix:/{'d' * 100}"],
            r"^\[config\] listen: a socket path must be at most 99",
        ),
        (["--trace-dir-mb", "-1"], "trace_dir_mb must be at least 0"),
        (["--otlp-endpoint", "127.0.0.1:4317"], "otlp_endpoint must be http://HOST:PORT"),
        (["--otlp-endpoint", "http://[::1"], "otlp_endpoint must be http://HOST:PORT"),
        (["--otlp-endpoint", "http://h:port"], "otlp_endpoint must be http://HOST:PORT"),
        (["--otlp-step-every", "-1"], "otlp_step_every must be at least 0"),
        (["--executor", "10.0.0.1:1"], "executor must be a loopback"),
    ],
)
def test_what_cannot_be_used_is_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        config.load(flags, ENVIRON)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:80", "localhost:80", "unix:/x/s.sock"])
def test_loopback_and_sockets_are_accepted(listen: str) -> None:
    assert config.load(["--listen", listen], ENVIRON).listen == listen


def test_a_variable_is_checked_like_a_flag() -> None:
    with pytest.raises(ConfigurationError, match="--max-num-seqs"):
        config.load([], ENVIRON | {"ISOBATCH_SCHEDULER_MAX_NUM_SEQS": "x"})
