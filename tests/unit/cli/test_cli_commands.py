"""The commands against a fake scheduler, inside this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner, Result

from isobatch.scheduler.v1 import sampling_pb2, scheduler_service_pb2
from scheduler_service.cli import app
from scheduler_service.cli.failures import (
    EXIT_CONFIGURATION,
    EXIT_FAILURE,
    EXIT_INVALID,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
)
from tests.support import fake_scheduler
from tests.support.fake_scheduler import FakeScheduler

Run = Callable[..., Result]


@pytest.fixture
def run(fake: FakeScheduler) -> Run:
    """A function that runs a command against the fake."""

    def call(*arguments: str, text: str | None = None) -> Result:
        environment = {"ISOBATCH_ADDRESS": fake.address}
        return CliRunner().invoke(app.cli, list(arguments), input=text, env=environment)

    return call


def test_generate_streams_the_answer(run: Run, fake: FakeScheduler) -> None:
    """Standard output holds the answer and nothing else; without a terminal no remark follows."""
    result = run("generate", "-p", "hello")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "w0 w1 w2 w3 w4 \n", "")
    (request,) = fake.requests
    assert [(turn.role, turn.content) for turn in request.chat.messages] == [("user", "hello")]


def test_generate_says_that_the_limit_cut_the_answer(run: Run) -> None:
    """On standard error, and not in JSON, which has the reason."""
    result = run("generate", "-p", "hello", "-n", "3")
    assert (result.exit_code, result.stdout) == (0, "w0 w1 w2 \n")
    assert result.stderr == "The answer was cut at 3 tokens; --max-tokens allows more.\n"
    assert run("generate", "-p", "hello", "-n", "3", "--json").stderr == ""


def test_an_answer_that_ends_by_itself_at_the_limit_is_not_cut(
    run: Run, fake: FakeScheduler
) -> None:
    """The reason decides, not the count."""

    def stop(
        request: scheduler_service_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[scheduler_service_pb2.GenerateResponse]:
        *deltas, last = fake_scheduler.answer(request, context)
        last.finished.reason = sampling_pb2.FINISH_REASON_STOP
        yield from (*deltas, last)

    fake.script = stop
    result = run("generate", "-p", "x", "-n", "3")
    assert (result.stdout, result.stderr) == ("w0 w1 w2 \n", "")


def test_generate_options_reach_the_request(run: Run, fake: FakeScheduler) -> None:
    """Each option has its own field."""
    result = run(
        *("generate", "-p", "x", "--system", "be brief", "--model", "toy", "--max-tokens", "2"),
        *("--temperature", "0.5", "--top-k", "3", "--top-p", "0.25", "--min-p", "0.125"),
        *("--seed", "9", "--stop", "a", "--stop", "b"),
        *("--priority", "batch", "--client", "me", "--deadline", "60"),
    )
    assert result.exit_code == 0
    (request,) = fake.requests
    sampling, stopping = request.sampling, request.stopping
    assert request.model == "toy"
    assert request.chat.messages[0].role == "system"
    assert request.chat.messages[0].content == "be brief"
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 3, 0.25)
    assert (sampling.min_p, sampling.seed) == (0.125, 9)
    assert (stopping.max_tokens, list(stopping.stop)) == (2, ["a", "b"])
    assert (request.priority, request.client_id) == (scheduler_service_pb2.PRIORITY_BATCH, "me")


@pytest.mark.parametrize("as_json", [False, True])
def test_several_answers_come_under_their_numbers(
    run: Run, fake: FakeScheduler, as_json: bool
) -> None:
    """Whole, and in order, however their tokens came; as JSON each is a line."""

    def samples(
        request: scheduler_service_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[scheduler_service_pb2.GenerateResponse]:
        first, token, *_, last = fake_scheduler.answer(request, context)
        first.accepted.num_samples = request.num_samples
        yield first
        for index in (1, 0):
            token.sample_index = last.sample_index = index
            last.finished.usage.num_generated_tokens = 1
            yield from (token, last)

    fake.script = samples
    result = run("generate", "-p", "x", "--n", "2", *(["--json"] if as_json else []))
    assert fake.requests[0].num_samples == 2
    if not as_json:
        assert result.stdout == "--- 0 ---\nw0 \n--- 1 ---\nw0 \n"
        return
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(each["sample_index"], each["seed"]) for each in answers] == [(0, 4711), (1, 4712)]


def test_somebody_who_chats_waits_for_every_token(run: Run, fake: FakeScheduler) -> None:
    """Unless told otherwise a conversation is interactive, and a single answer is not."""
    run("chat", text="hi\n/exit\n")
    run("generate", "-p", "hi")
    assert [request.priority for request in fake.requests] == [
        scheduler_service_pb2.PRIORITY_INTERACTIVE,
        scheduler_service_pb2.PRIORITY_UNSPECIFIED,
    ]


def test_generate_without_options_says_nothing_about_sampling(
    run: Run, fake: FakeScheduler
) -> None:
    """The defaults are the server's."""
    run("generate", "-p", "x")
    assert fake.requests[0].sampling == type(fake.requests[0].sampling)()


def test_generate_raw_reads_standard_input(run: Run, fake: FakeScheduler) -> None:
    """The prompt may be piped in, and goes as it is."""
    result = run("generate", "--raw", text="once upon\na time")
    assert result.exit_code == 0
    assert fake.requests[0].text == "once upon\na time"


def test_generate_stats_go_to_standard_error(run: Run) -> None:
    """Tokens, times, speed and seed in one line; the fake took 0.4 s for four tokens."""
    result = run("generate", "-p", "x", "--stats")
    assert result.stdout == "w0 w1 w2 w3 w4 \n"
    assert result.stderr == (
        "3 prompt tokens (2 cached) | 5 generated | first token 0.020 s | 10.0 tokens/s"
        " | ended by stop | seed 4711 | toy [X1]\n"
    )


def test_generate_json_is_one_object(run: Run) -> None:
    """A program reads the whole answer."""
    result = run("generate", "-p", "x", "-n", "2", "--json")
    document = json.loads(result.stdout)
    assert document["text"] == "w0 w1 "
    assert document["token_ids"] == [100, 101]
    assert document["finish_reason"] == "length"
    assert document["usage"]["num_generated_tokens"] == 2


def test_error_amid_an_answer_begins_on_its_own_line(run: Run, fake: FakeScheduler) -> None:
    """What came is printed, then the error, and the code says that the server failed."""

    def fail_late(
        request: scheduler_service_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[scheduler_service_pb2.GenerateResponse]:
        yield fake_scheduler.accepted(request)
        yield fake_scheduler.delta(0)
        fake_scheduler.fail(context, grpc.StatusCode.INTERNAL, "layer 3 is not finite")

    fake.script = fail_late
    result = run("generate", "-p", "x")
    assert result.exit_code == EXIT_FAILURE
    assert (result.stdout, result.stderr) == ("w0 \n", "isobatch: layer 3 is not finite\n")


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, EXIT_INVALID),
        (grpc.StatusCode.NOT_FOUND, EXIT_INVALID),
        (grpc.StatusCode.PERMISSION_DENIED, EXIT_INVALID),
        (grpc.StatusCode.UNAVAILABLE, EXIT_UNAVAILABLE),
        (grpc.StatusCode.DEADLINE_EXCEEDED, EXIT_UNAVAILABLE),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, EXIT_UNAVAILABLE),
        (grpc.StatusCode.INTERNAL, EXIT_FAILURE),
    ],
)
def test_status_decides_the_exit_code(
    run: Run, fake: FakeScheduler, code: grpc.StatusCode, exit_code: int
) -> None:
    """Scripts tell "later" from "never" by the code."""

    def refuse(context: grpc.ServicerContext) -> None:
        fake_scheduler.fail(context, code, "no", fake_scheduler.error_info("REASON"))

    fake.before_unary = refuse
    assert run("models").exit_code == exit_code


def test_json_errors(run: Run, fake: FakeScheduler) -> None:
    """Under --json an error is one line of JSON with the server's details."""

    def refuse(context: grpc.ServicerContext) -> None:
        fake_scheduler.fail(
            context,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "full",
            fake_scheduler.error_info("QUEUE_FULL", limit="4"),
            fake_scheduler.retry_info(0.5),
        )

    fake.before_unary = refuse
    result = run("stats", "--json")
    assert result.stdout == ""
    assert json.loads(result.stderr) == {
        "error": {
            "message": "full",
            "code": "RESOURCE_EXHAUSTED",
            "reason": "QUEUE_FULL",
            "metadata": {"limit": "4"},
            "violations": [],
            "retry_after_seconds": 0.5,
        }
    }


@pytest.mark.parametrize(
    ("arguments", "knows_serve"),
    [
        (("models",), False),
        (("stats",), False),
        (("tokenize", "a"), False),
        (("generate", "-p", "a"), True),
        (("chat",), True),
    ],
    ids=lambda each: each[0] if isinstance(each, tuple) else "",
)
def test_no_server_says_how_to_start_one(
    tmp_path: Path, arguments: tuple[str, ...], knows_serve: bool
) -> None:
    """At once, without the connect timeout, and only by what the command itself can do."""
    address = ("--address", f"unix:{tmp_path}/none.sock")
    result = CliRunner().invoke(app.cli, [*arguments, *address])
    assert result.exit_code == EXIT_UNAVAILABLE
    assert "none.sock" in result.stderr
    assert "isobatch serve" in result.stderr
    assert ("--serve" in result.stderr) is knows_serve


def test_runtime_directory_too_long_is_a_configuration_error() -> None:
    """The default address cannot be made."""
    environment = {"XDG_RUNTIME_DIR": "/" + "x" * 100}
    result = CliRunner().invoke(app.cli, ["stats"], env=environment)
    assert result.exit_code == EXIT_CONFIGURATION
    assert "at most 99 bytes" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "-p", "x", "--raw", "--system", "y"), "leave --raw out"),
        (("generate", "-p", "x", "--threads", "2"), "need --serve"),
        (("generate", "-p", "x", "--serve", "--address", "unix:/s"), "leave --address out"),
        (("serve", "--port", "80", "--listen", "unix:/s"), "give one of them"),
        (("serve", "--port", "70000"), "70000"),
        (("generate", "-p", "x", "--top-k", "many"), "many"),
        (("chat", "-n", "0"), "x>=1"),
    ],
)
def test_wrong_usage(run: Run, arguments: tuple[str, ...], message: str) -> None:
    """Options that contradict each other are refused before anything starts."""
    result = run(*arguments)
    assert result.exit_code == EXIT_USAGE
    assert message in result.stderr


def test_standard_input_must_be_text(run: Run) -> None:
    """Bytes that are not UTF-8 are named, not guessed at."""
    environment_free = CliRunner().invoke(app.cli, ["generate"], input=b"\xff\xfe")
    assert environment_free.exit_code == EXIT_USAGE
    assert "must be UTF-8" in environment_free.stderr


def test_hint_is_for_no_server_only(run: Run, fake: FakeScheduler) -> None:
    """A server that answers that it is not ready need not be started."""

    def refuse(context: grpc.ServicerContext) -> None:
        info = fake_scheduler.error_info("EXECUTOR_UNAVAILABLE")
        fake_scheduler.fail(context, grpc.StatusCode.UNAVAILABLE, "loading", info)

    fake.before_unary = refuse
    assert run("stats").stderr == "isobatch: loading\n"


def test_models_as_text_and_json(run: Run) -> None:
    """The same facts in both forms."""
    text = run("models").stdout
    assert "134.5 million" in text
    assert "2,048 tokens" in text
    (model,) = json.loads(run("models", "--json").stdout)
    assert (model["model"], model["num_parameters"]) == ("toy", 134_515_008)


def test_stats_as_text_and_json(run: Run) -> None:
    """The same counts in both forms."""
    assert "9 of 8" in run("stats").stdout
    assert json.loads(run("stats", "--json").stdout)["num_executor_reconnects"] == 7


def test_tokenize(run: Run, fake: FakeScheduler) -> None:
    """Ids of an argument, of standard input, and of a user's turn."""
    assert run("tokenize", "ab").stdout == "97 98\n"
    assert run("tokenize", text="a\n").stdout == "97 10\n"
    assert json.loads(run("tokenize", "--chat", "--json", "a").stdout)["rendered"] == "<user>a"
    assert run("tokenize", "-m", "toy", "a").exit_code == 0
    assert fake.tokenize_requests[-1].model == "toy"


def test_chat_keeps_the_conversation(run: Run, fake: FakeScheduler) -> None:
    """Each turn carries the ones before; /reset forgets them, but not the system message."""
    result = run("chat", "--system", "s", "-n", "1", text="one\ntwo\n/reset\nthree\n/exit\nfour\n")
    assert result.exit_code == 0
    assert result.stdout == "w0 \nw0 \nw0 \n"
    said = [[turn.content for turn in request.chat.messages] for request in fake.requests]
    assert said == [["s", "one"], ["s", "one", "w0 ", "two"], ["s", "three"]]


def test_chat_has_a_limit_of_tokens_and_says_when_it_cut(
    run: Run, fake: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of its own, of a variable or of the option; nothing is said of an end by itself."""
    said = "The answer was cut at {} tokens; --max-tokens allows more.\n"
    assert run("chat", text="one\n").stderr.endswith(said.format(1000))
    assert run("chat", "-n", "2", text="one\n").stderr.endswith(said.format(2))
    monkeypatch.setenv("ISOBATCH_CHAT_MAX_TOKENS", "3")
    assert run("chat", text="one\n").stderr.endswith(said.format(3))
    assert [request.stopping.max_tokens for request in fake.requests] == [1000, 2, 3]
    stop = sampling_pb2.FINISH_REASON_STOP

    def ends_by_itself(
        request: scheduler_service_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[scheduler_service_pb2.GenerateResponse]:
        del context
        yield from (fake_scheduler.accepted(request), fake_scheduler.delta(0, 3))
        yield fake_scheduler.finished(3, stop)

    fake.script = ends_by_itself
    assert "cut" not in run("chat", text="one\n").stderr


def test_an_answer_cut_by_the_context_says_so(run: Run, fake: FakeScheduler) -> None:
    def short(
        request: scheduler_service_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[scheduler_service_pb2.GenerateResponse]:
        del context
        yield from (fake_scheduler.accepted(request), fake_scheduler.delta(0, 2))
        yield fake_scheduler.finished(2)

    fake.script = short
    fake.context_length = 5
    words = "The answer was cut: with 5 tokens the model's context is full.\n"
    assert run("generate", "-p", "x").stderr == words
    assert run("chat", text="x\n").stderr.endswith(words)
    # Its cache has not even room for that.
    fake.context_length = 2048
    words = "cache is full; a larger kv_memory_mb allows more, up to the model's context of 2048.\n"
    assert run("generate", "-p", "x").stderr.endswith(words)
    assert run("chat", text="x\n").stderr.endswith(words)


def test_chat_goes_on_after_an_error(run: Run, fake: FakeScheduler) -> None:
    """A turn that failed is shown and leaves no trace."""

    def fail_first(
        request: scheduler_service_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[scheduler_service_pb2.GenerateResponse]:
        if len(fake.requests) == 1:
            fake_scheduler.fail(context, grpc.StatusCode.INVALID_ARGUMENT, "too long")
        yield from fake_scheduler.answer(request, context)

    fake.script = fail_first
    result = run("chat", "-n", "1", text="one\n\ntwo\n/help\n")
    assert result.exit_code == 0
    assert result.stdout == "w0 \n"
    assert "isobatch: too long" in result.stderr
    assert [turn.content for turn in fake.requests[-1].chat.messages] == ["two"]


def test_version_and_help() -> None:
    """Every command has a line in the help."""
    version = CliRunner().invoke(app.cli, ["--version"])
    assert (version.exit_code, version.stdout.split()[0]) == (0, "isobatch")
    text = CliRunner().invoke(app.cli, ["--help"]).stdout
    for name in ("chat", "generate", "models", "pull", "serve", "stats", "tokenize"):
        assert f"\n  {name} " in text
