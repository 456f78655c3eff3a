"""The configuration file: order of strength, origins, and what is refused with a hint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from executor_service import config as executor_config
from executor_service.__main__ import main as executor_main
from executor_service.errors import ConfigError
from scheduler_service import config, settings
from scheduler_service.__main__ import main
from scheduler_service.errors import ConfigurationError

ENVIRON = {"XDG_RUNTIME_DIR": "/run/user/1"}


def _file(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    return path


def test_flags_win_over_variables_and_these_over_the_file(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        "[scheduler]\nmax_num_seqs = 1\nmax_num_waiting = 2\ndrain_seconds = 3\n"
        '[executor]\nmodel = "m.gguf"\nthreads = 4\n',
    )
    environ = ENVIRON | {
        "ISOBATCH_CONFIG": str(path),
        "ISOBATCH_SCHEDULER_MAX_NUM_SEQS": "10",
        "ISOBATCH_SCHEDULER_MAX_NUM_WAITING": "20",
    }
    loaded = config.read(["--max-num-waiting", "200"], environ).settings
    assert loaded["max_num_waiting"] == settings.Setting(200, "flag")
    variable = "variable ISOBATCH_SCHEDULER_MAX_NUM_SEQS"
    assert loaded["max_num_seqs"] == settings.Setting(10, variable)
    assert loaded["drain_seconds"] == settings.Setting(3.0, f"file {path}")
    assert isinstance(loaded["drain_seconds"].value, float)
    assert loaded["log_level"] == settings.Setting("info", "default")
    assert loaded["listen"].origin == "default"
    executor = executor_config.load([], environ)
    assert (executor.model, executor.threads) == ("m.gguf", 4)


def test_where_the_file_is_looked_for(tmp_path: Path) -> None:
    assert settings.default_file({}) is None
    home = settings.default_file({"HOME": "/h"})
    assert home == Path("/h/.config/isobatch/config.toml")
    assert settings.default_file({"HOME": "/h", "XDG_CONFIG_HOME": "relative"}) == home
    folder = tmp_path / "isobatch"
    folder.mkdir()
    environ = ENVIRON | {"HOME": "/nowhere", "XDG_CONFIG_HOME": str(tmp_path)}
    assert config.load([], environ).max_num_seqs == 256
    _file(folder, "[scheduler]\nmax_num_seqs = 5\n")
    assert config.load([], environ).max_num_seqs == 5
    other = _file(tmp_path, "[scheduler]\nmax_num_seqs = 6\n")
    assert config.load([], environ | {"ISOBATCH_CONFIG": str(other)}).max_num_seqs == 6
    assert config.load(["--config", "/dev/null"], environ).max_num_seqs == 256


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[schedular]", r"a table must be a known one, got schedular; did you mean scheduler\?"),
        ("scheduler = 3", r"\[scheduler\] must be a table, got 3"),
        (
            "[scheduler]\nmax_num_sequs = 3",
            r"a key .* got max_num_sequs; did you mean max_num_seqs",
        ),
        ("[scheduler]\nzzz = 3", "a key must be a known one, got zzz; known are listen, executor"),
        ('[scheduler]\nmax_num_seqs = "3"', "max_num_seqs must be of type int, got '3'"),
        ("[scheduler]\nmax_num_seqs = true", "max_num_seqs must be of type int, got True"),
        ("[scheduler]\ndrain_seconds = false", "drain_seconds must be of type float"),
        ("[scheduler]\nmax_num_seqs = 0", "max_num_seqs must be at least 1, got 0"),
        ("[scheduler", "the file must be TOML"),
        ("[scheduler]\nlisten = " + "[" * 100_000, "the file must be TOML, got .*recursion"),
        (
            '[scheduler]\nlog_file = "/a\\u0000b"',
            r"log_file must have no zero byte, got '/a\\x00b'",
        ),
    ],
)
def test_what_a_file_must_not_hold(tmp_path: Path, text: str, message: str) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(ConfigurationError, match=message):
        config.load([], ENVIRON | {"ISOBATCH_CONFIG": str(path)})
    executor_text = text.replace("[scheduler]\nmax_num_sequs", "[executor]\nmax_num_sequs")
    if executor_text != text:
        _file(tmp_path, executor_text)
        with pytest.raises(ConfigError, match=message):
            executor_config.load(["--config", str(path)], ENVIRON)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """Some editors write one."""
    path = _file(tmp_path, "\ufeff[scheduler]\nmax_num_seqs = 7\n[executor]\nthreads = 3\n")
    assert config.load(["--config", str(path)], ENVIRON).max_num_seqs == 7
    flags = ["--config", str(path), "--model", "m"]
    assert executor_config.load(flags, ENVIRON).threads == 3


def test_a_file_that_was_named_must_be_there() -> None:
    with pytest.raises(ConfigurationError, match="the file must be readable, got No such file"):
        config.load(["--config", "/no/such.toml"], ENVIRON)


def test_unknown_variables_and_flags_get_a_hint() -> None:
    environ = ENVIRON | {"ISOBATCH_SCHEDULER_METRIC_PORT": "1"}
    with pytest.raises(ConfigurationError, match="did you mean ISOBATCH_SCHEDULER_METRICS_PORT"):
        config.load([], environ)
    with pytest.raises(ConfigurationError, match="--metric-port 1; did you mean --metrics-port"):
        config.load(["--metric-port", "1"], ENVIRON)


@pytest.mark.parametrize("name", ["COLOUR", "PORT", "BASE_URL"])
def test_a_variable_unlike_all_others_gets_the_list(name: str) -> None:
    """The prefix that all share does not make them alike."""
    with pytest.raises(ConfigurationError) as scheduler:
        config.load([], ENVIRON | {f"ISOBATCH_SCHEDULER_{name}": "1"})
    with pytest.raises(ConfigError) as executor:
        executor_config.load([], ENVIRON | {f"ISOBATCH_EXECUTOR_{name}": "1"})
    for error in (scheduler, executor):
        assert "did you mean" not in str(error.value)
        assert f"_{name}; known are ISOBATCH_" in str(error.value)


def test_the_services_show_their_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--show-config", "--metrics-port", "7"]) == 0
    shown = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert shown["metrics_port"] == {"name": "metrics_port", "value": 7, "origin": "flag"}
    assert executor_main(["--show-config", "--threads", "3"]) == 0
    assert '{"name": "threads", "value": 3, "origin": "flag"}' in capsys.readouterr().out
    assert main(["--show-config", "--metrics-port", "-7"]) == 78
