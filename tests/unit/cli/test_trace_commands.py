"""explain, replay and trace on files: exit codes, formats, what is refused."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from scheduler_service.cli import app
from scheduler_service.cli.trace_files import write_trace
from scheduler_service.tracing.model import Trace
from scheduler_service.wire import trace as wire
from tests.support.fake_scheduler import FakeScheduler
from tests.support.traces import HEADER, make_trace

TOKENS = tuple(range(100, 112))
NO_DIGESTS = replace(HEADER, has_kv_digests=False)


def _run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app.cli, [str(each) for each in arguments])


def _write(path: Path, trace: Trace) -> Path:
    assert trace.end is not None
    steps = (
        wire.kernel_paths(step.kernel_paths) + wire.step(step, index)
        for index, step in enumerate(trace.steps)
    )
    write_trace(path, wire.header(trace.header) + b"".join(steps) + wire.end(trace.end))
    return path


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    trace = make_trace((*TOKENS[:8], 3), crowds={5: (9,)}, bad_logits_from=5, header=NO_DIGESTS)
    return _write(tmp_path / "crowded.isotrace", trace)


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    return _write(tmp_path / "alone.isotrace", make_trace(TOKENS, header=NO_DIGESTS))


def test_explain_ends_as_diff_does(crowded: Path, alone: Path) -> None:
    different = _run("explain", crowded, alone)
    assert different.exit_code == 1
    assert f"A: {crowded}, 9 tokens, class threshold4" in different.stdout
    assert "Output token 8 is the first that differs: A drew 3, B drew 108" in different.stdout
    assert "position 16" in different.stdout
    equal = _run("explain", alone, alone)
    assert equal.exit_code == 0
    assert "Equal: 12 tokens" in equal.stdout


def test_explain_as_json(crowded: Path, alone: Path) -> None:
    result = _run("explain", crowded, alone, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert (document["equal"], document["first_logits"]["index"]) == (False, 5)


def test_explain_refuses_traces_of_two_requests(tmp_path: Path, alone: Path) -> None:
    header = replace(NO_DIGESTS, prompt_token_ids=(1, 2))
    other = _write(tmp_path / "other", make_trace(TOKENS, header=header))
    result = _run("explain", alone, other)
    assert result.exit_code == 2
    assert "must be of one request, got other prompt_token_ids" in result.stderr


@pytest.mark.parametrize("data", [b"", b"text", b"\x0a\x02\x1a\x00"])
def test_what_is_no_trace_is_refused(tmp_path: Path, alone: Path, data: bytes) -> None:
    path = tmp_path / "no.isotrace"
    path.write_bytes(data)
    for arguments in (("explain", alone, path), ("trace", "export", path), ("replay", path)):
        result = _run(*arguments)
        assert result.exit_code == 2
        assert "[trace]" in result.stderr


def test_a_device_is_no_trace(alone: Path) -> None:
    """One that never ends would fill the memory."""
    for arguments in (("explain", alone, "/dev/zero"), ("trace", "export", "/dev/zero")):
        result = _run(*arguments)
        assert result.exit_code == 2
        assert "must be a file or a pipe, got device /dev/zero" in result.stderr


def test_explain_wants_a_second_trace_or_solo(alone: Path) -> None:
    for arguments in ((alone,), (alone, alone, "--solo")):
        result = _run("explain", *arguments)
        assert result.exit_code == 2
        assert "--solo" in result.stderr


def test_exports(alone: Path) -> None:
    lines = _run("trace", "export", alone).stdout.splitlines()
    assert [json.loads(line)["record"] for line in lines] == ["header", *["step"] * 12, "end"]
    document = json.loads(_run("trace", "export", alone, "--format", "perfetto").stdout)
    assert len(document["traceEvents"]) == 3 + 4 * 12


def test_a_trace_is_private(alone: Path) -> None:
    assert stat.S_IMODE(alone.stat().st_mode) == 0o600


def test_replay_wants_the_same_weights_and_class(alone: Path, fake: FakeScheduler) -> None:
    result = _run("replay", alone, "--address", fake.address)
    assert result.exit_code == 4
    assert "the server must have the weights of toy (00ff)" in result.stderr


@pytest.mark.parametrize("command", [("replay",), ("explain", "--solo")])
def test_replay_may_have_a_server_of_its_own(alone: Path, command: tuple[str, ...]) -> None:
    """A model is for that server alone; without any, the hint says what to start."""
    result = _run(*command, alone, "--model", "x")
    assert (result.exit_code, "--model needs --serve" in result.stderr) == (2, True)
    result = _run(*command, alone, "--address", f"unix:{alone.parent}/none.sock")
    assert result.exit_code == 3
    assert "isobatch serve" in result.stderr
    assert "--serve" in result.stderr


def test_explain_serves_for_a_run_alone_only(alone: Path) -> None:
    result = _run("explain", alone, alone, "--serve")
    assert (result.exit_code, "--serve is for --solo" in result.stderr) == (2, True)


def test_a_replay_without_a_trace_of_its_own_is_told_of(
    tmp_path: Path, fake: FakeScheduler
) -> None:
    """An older server ignores the wish for a trace."""
    header = replace(NO_DIGESTS, weights_digest="abc123", numeric_class="X1")
    path = _write(tmp_path / "a", make_trace(TOKENS, header=header))
    result = _run("replay", path, "--address", fake.address)
    assert result.exit_code == 1
    assert "the server must know traces, got none" in result.stderr


def test_a_server_that_knows_no_traces_is_told_of(tmp_path: Path, fake: FakeScheduler) -> None:
    path = tmp_path / "t"
    address = ("--address", fake.address)
    result = _run("generate", "-p", "hello", "--raw", "--trace", path, *address)
    assert result.exit_code == 1
    assert "the server must know traces, got none" in result.stderr
    assert not path.exists()
    assert _run("generate", "-p", "x", "--trace-kv", *address).exit_code == 2
