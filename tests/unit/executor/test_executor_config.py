"""Configuration: flags over variables over defaults, and refusals that name the field."""

from __future__ import annotations

from dataclasses import fields

import pytest

from executor_service import config
from executor_service.config import ExecutorConfig, load
from executor_service.errors import ConfigError

ENVIRON = {"XDG_RUNTIME_DIR": "/run/user/7"}


def test_defaults() -> None:
    values = load([], ENVIRON)
    assert values.listen == "unix:/run/user/7/isobatch/executor.sock"
    assert values.model == "smollm2-135m-instruct"
    assert (values.metrics_port, values.max_num_seqs) == (9401, 256)
    assert values.max_num_batched_tokens == 512


def test_flags_win_over_variables() -> None:
    environ = ENVIRON | {"ISOBATCH_EXECUTOR_THREADS": "3", "ISOBATCH_EXECUTOR_METRICS_PORT": "1"}
    values = load(["--metrics-port", "0", "--reflection", "false"], environ)
    assert (values.threads, values.metrics_port, values.reflection) == (3, 0, False)


def test_every_field_has_a_flag_and_a_help_text() -> None:
    assert config.HELP.keys() == {each.name for each in fields(ExecutorConfig)}


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--listen", "127.0.0.1:1"], r"\[listen\] the address must be unix:/absolute/path"),
        (["--listen", "unix:relative.sock"], "must be unix:/absolute/path"),
        (["--listen", "unix:/" + "a" * 99], "at most 99 bytes, got 100"),
        (["--metrics-port", "65536"], r"metrics_port must be in 0\.\.65535, got 65536"),
        (["--metrics-port", "x"], "--metrics-port"),
        (["--max-num-seqs", "0"], r"max_num_seqs must be in 1\.\.65536, got 0"),
        (["--kv-memory-mb", "-1"], "kv_memory_mb must be at least 0, got -1"),
        (["--threads", "-1"], r"threads must be in 0\.\.1024"),
        (["--unit", "mmx"], "unit must be one of auto, reference, .* got 'mmx'"),
        (["--backend", "npu"], "backend must be one of auto, cpu, metal, .* got 'npu'"),
        (["--backend", "metal", "--unit", "avx2"], "unit must be auto for backend metal"),
        (["--policy", "fast"], "policy must be one of exact, mlx, .* got 'fast'"),
        (["--threshold-rows", "-1"], r"threshold_rows must be in 0\.\.65536, got -1"),
        (["--policy", "gemv", "--activations", "8"], "must be 12 but for policy exact, got 8"),
        (["--log-level", "loud"], "log_level must be one of debug"),
        (["--drain-seconds", "nan"], "drain_seconds must be a finite number"),
        (["--reflection", "maybe"], "--reflection: must be true or false"),
        (["--model", ""], "model must not be empty"),
        (["--no-such-flag"], "unrecognized arguments"),
        (["--metrics", "1"], "unrecognized arguments"),
    ],
)
def test_refusals(arguments: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load(arguments, ENVIRON)


def test_a_bad_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match="--threads: invalid int value: 'many'"):
        load([], ENVIRON | {"ISOBATCH_EXECUTOR_THREADS": "many"})
