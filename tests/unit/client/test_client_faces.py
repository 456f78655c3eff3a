"""What both faces of the SDK promise, run against each: they must not drift apart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import grpc
import pytest

from isobatch.scheduler.v1 import scheduler_service_pb2
from scheduler_service import client as sdk
from scheduler_service.client import AsyncClient, ChatMessage, Client, GenerationParams
from tests.support import fake_scheduler
from tests.support.fake_scheduler import FakeScheduler


class Face(Protocol):
    """One face of the SDK behind plain functions."""

    def events(self, address: str, prompt: sdk.Prompt, **options: Any) -> list[sdk.Event]:
        """Return all events of a request."""

    def complete(self, address: str, prompt: sdk.Prompt, **options: Any) -> sdk.Completion:
        """Return the whole answer."""

    def call(self, address: str, method: str, *args: Any, **options: Any) -> Any:
        """Return the answer of a plain call."""

    def take(self, address: str, count: int) -> None:
        """Read `count` events of a request and leave."""


def split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the client and those of the call."""
    names = ("connect_timeout", "first_token_timeout", "retry_seconds", "model")
    own = {name: options.pop(name) for name in names if name in options}
    return own, options


class SyncFace:
    """The synchronous face."""

    def events(self, address: str, prompt: sdk.Prompt, **options: Any) -> list[sdk.Event]:
        own, options = split(options)
        with Client(address, **own) as client:
            return list(client.generate(prompt, **options))

    def complete(self, address: str, prompt: sdk.Prompt, **options: Any) -> sdk.Completion:
        own, options = split(options)
        with Client(address, **own) as client:
            return client.complete(prompt, **options)

    def call(self, address: str, method: str, *args: Any, **options: Any) -> Any:
        own, options = split(options)
        with Client(address, **own) as client:
            return getattr(client, method)(*args, **options)

    def take(self, address: str, count: int) -> None:
        client = Client(address)
        with client.generate("x") as stream:
            for _ in range(count):
                next(stream)


class AsyncFace:
    """The asyncio face."""

    def events(self, address: str, prompt: sdk.Prompt, **options: Any) -> list[sdk.Event]:
        own, options = split(options)

        async def run() -> list[sdk.Event]:
            async with AsyncClient(address, **own) as client:
                return [event async for event in await client.generate(prompt, **options)]

        return asyncio.run(run())

    def complete(self, address: str, prompt: sdk.Prompt, **options: Any) -> sdk.Completion:
        own, options = split(options)

        async def run() -> sdk.Completion:
            async with AsyncClient(address, **own) as client:
                return await client.complete(prompt, **options)

        return asyncio.run(run())

    def call(self, address: str, method: str, *args: Any, **options: Any) -> Any:
        own, options = split(options)

        async def run() -> Any:
            async with AsyncClient(address, **own) as client:
                return await getattr(client, method)(*args, **options)

        return asyncio.run(run())

    def take(self, address: str, count: int) -> None:
        async def run() -> None:
            async with AsyncClient(address) as client, await client.generate("x") as stream:
                for _ in range(count):
                    await anext(stream)

        asyncio.run(run())


@pytest.fixture(params=[SyncFace(), AsyncFace()], ids=["sync", "async"])
def face(request: pytest.FixtureRequest) -> Face:
    """Each face in turn."""
    chosen: Face = request.param
    return chosen


def test_events_join_into_the_text(face: Face, fake: FakeScheduler) -> None:
    """Accepted, the tokens, Finished; every event has text to join."""
    events = face.events(fake.address, "hello", params=GenerationParams(max_tokens=3))
    assert [type(event) for event in events] == [
        sdk.Accepted,
        *[sdk.TokenEvent] * 3,
        sdk.Finished,
    ]
    assert "".join(event.text for event in events) == "w0 w1 w2 "


def test_completion_is_whole(face: Face, fake: FakeScheduler) -> None:
    """All that the stream said is in the answer."""
    completion = face.complete(
        fake.address, "hello", params=GenerationParams(max_tokens=2), request_id="mine"
    )
    assert completion == sdk.Completion(
        request_id="mine",
        model="toy",
        text="w0 w1 ",
        token_ids=(100, 101),
        finish_reason=sdk.FinishReason.LENGTH,
        stop_string=None,
        stop_token_id=None,
        seed=fake_scheduler.DRAWN_SEED,
        numeric_class="X1",
        usage=sdk.Usage(3, 2, 2),
        timings=sdk.Timings(0.001, 0.02, 0.42),
        num_preemptions=0,
    )


@pytest.mark.parametrize("seconds", [1e300, float("inf"), 1e11])
def test_a_deadline_that_nobody_lives_to_see_is_none(
    face: Face, fake: FakeScheduler, seconds: float
) -> None:
    """gRPC would take it for one that has passed."""
    options = {"timeout": seconds, "first_token_timeout": seconds}
    assert face.complete(fake.address, "a", **options).text
    assert face.call(fake.address, "stats", timeout=seconds).num_running == 1


def test_a_timeout_must_be_a_number(face: Face, fake: FakeScheduler) -> None:
    """A NaN is neither soon nor late."""
    with pytest.raises(sdk.InvalidRequestError, match=r"\[call\] timeout must be a number"):
        face.complete(fake.address, "a", timeout=float("nan"))


def test_each_request_has_its_own_id(face: Face, fake: FakeScheduler) -> None:
    """The client names its requests, so that another thread can cancel them."""
    face.complete(fake.address, "a")
    face.complete(fake.address, "b")
    first, second = (request.request_id for request in fake.requests)
    assert len(first) == len(second) == 36
    assert first != second


def test_model_of_the_client_and_of_the_call(face: Face, fake: FakeScheduler) -> None:
    """The call's model wins over the client's."""
    face.complete(fake.address, "a", model="mine")
    assert fake.requests[-1].model == "mine"


def test_plain_calls(face: Face, fake: FakeScheduler) -> None:
    """Models, ids, counts and cancel."""
    (model,) = face.call(fake.address, "list_models")
    assert (model.model, model.context_length, model.num_parameters) == ("toy", 2048, 134_515_008)
    assert face.call(fake.address, "tokenize", "ab") == sdk.Tokenization((97, 98), "")
    chat = [ChatMessage("user", "b")]
    assert face.call(fake.address, "tokenize", chat).rendered == "<user>b"
    assert face.call(fake.address, "stats") == sdk.Stats(1, 2, 3, 4, 5, 6, 7, 8, 9, True)
    assert face.call(fake.address, "cancel", "live") is True
    assert face.call(fake.address, "cancel", "gone") is False


def test_no_server_is_unavailable_within_the_connect_timeout(face: Face, tmp_path: Path) -> None:
    """The error names the address; the wait is the one asked for."""
    address = f"unix:{tmp_path}/none.sock"[:99]
    begin = time.monotonic()
    with pytest.raises(sdk.UnavailableError, match=f"no connection to {address}"):
        face.call(address, "stats", connect_timeout=0.2)
    assert 0.2 <= time.monotonic() - begin < 2.0


def test_retry_before_the_first_token_keeps_id_and_seed(face: Face, fake: FakeScheduler) -> None:
    """UNAVAILABLE with RetryInfo after Accepted: the answer comes, and Accepted only once."""

    def fail_once(
        request: scheduler_service_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[scheduler_service_pb2.GenerateResponse]:
        yield fake_scheduler.accepted(request)
        if len(fake.requests) == 1:
            fake_scheduler.fail(
                context,
                grpc.StatusCode.UNAVAILABLE,
                "executor lost",
                fake_scheduler.retry_info(0.01),
            )
        yield fake_scheduler.delta(0)
        yield fake_scheduler.finished(1)

    fake.script = fail_once
    events = face.events(fake.address, "x")
    assert [type(event) for event in events] == [sdk.Accepted, sdk.TokenEvent, sdk.Finished]
    first, second = fake.requests
    assert first.request_id == second.request_id
    assert not first.sampling.HasField("seed")
    assert second.sampling.seed == fake_scheduler.DRAWN_SEED


def test_no_retry_after_the_first_token(face: Face, fake: FakeScheduler) -> None:
    """Tokens were handed out, so a second stream would repeat them."""

    def fail_late(
        request: scheduler_service_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[scheduler_service_pb2.GenerateResponse]:
        yield fake_scheduler.accepted(request)
        yield fake_scheduler.delta(0)
        fake_scheduler.fail(
            context, grpc.StatusCode.UNAVAILABLE, "lost", fake_scheduler.retry_info(0.01)
        )

    fake.script = fail_late
    with pytest.raises(sdk.UnavailableError, match="lost"):
        face.complete(fake.address, "x")
    assert len(fake.requests) == 1


def test_retries_end_in_time(face: Face, fake: FakeScheduler) -> None:
    """A server that is never ready does not hold the caller for ever."""

    def refuse(context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata((("grpc-retry-pushback-ms", "-1"),))
        fake_scheduler.fail(
            context, grpc.StatusCode.UNAVAILABLE, "loading", fake_scheduler.retry_info(0.05)
        )

    fake.before_unary = refuse
    begin = time.monotonic()
    with pytest.raises(sdk.UnavailableError, match="loading"):
        face.call(fake.address, "list_models", retry_seconds=0.2)
    assert time.monotonic() - begin < 3.0


def test_first_token_timeout(face: Face, fake: FakeScheduler) -> None:
    """Accepted does not count as a token, and the server is told to stop."""
    fake.script = fake_scheduler.silent
    with pytest.raises(sdk.FirstTokenTimeoutError, match=r"within 0.2 s"):
        face.complete(fake.address, "x", first_token_timeout=0.2)
    assert fake.ended.acquire(timeout=60)


def test_first_token_timeout_does_not_cut_a_long_answer(face: Face, fake: FakeScheduler) -> None:
    """Once a token came, the timeout is over."""

    def slow(
        request: scheduler_service_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[scheduler_service_pb2.GenerateResponse]:
        yield fake_scheduler.accepted(request)
        yield fake_scheduler.delta(0)
        time.sleep(0.4)
        yield fake_scheduler.finished(1)

    fake.script = slow
    completion = face.complete(fake.address, "x", first_token_timeout=0.3)
    assert completion.text == "w0 "


def test_deadline_of_the_call(face: Face, fake: FakeScheduler) -> None:
    """`timeout` ends the call wherever it is."""
    fake.script = fake_scheduler.endless
    with pytest.raises(sdk.DeadlineError):
        face.complete(fake.address, "x", timeout=0.2)


def test_leaving_early_cancels_at_the_server(face: Face, fake: FakeScheduler) -> None:
    """Nobody reads on, so nobody need compute."""
    fake.script = fake_scheduler.endless
    face.take(fake.address, 2)
    assert fake.ended.acquire(timeout=60)


def test_stream_without_end_breaks_the_contract(face: Face, fake: FakeScheduler) -> None:
    """A server that just stops is not believed to have finished."""
    fake.script = lambda request, context: iter([fake_scheduler.accepted(request)])
    with pytest.raises(sdk.ProtocolError, match="must end with Finished"):
        face.complete(fake.address, "x")


def test_gap_in_the_tokens_is_an_error_and_ends_the_call(face: Face, fake: FakeScheduler) -> None:
    """A lost message must not become a shorter answer."""

    def gap(
        request: scheduler_service_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[scheduler_service_pb2.GenerateResponse]:
        yield fake_scheduler.accepted(request)
        yield fake_scheduler.delta(1)
        fake_scheduler.wait_for_end(context)

    fake.script = gap
    with pytest.raises(sdk.ProtocolError, match="must be 0, got 1"):
        face.complete(fake.address, "x")
    assert fake.ended.acquire(timeout=60)


def test_public_names_are_sorted_and_exist() -> None:
    """What `__all__` offers can be had."""
    assert sorted(sdk.__all__) == list(sdk.__all__)
    for name in sdk.__all__:
        assert hasattr(sdk, name)


def test_both_faces_offer_the_same_calls() -> None:
    """A call added to one face is missing on the other: say so."""

    def public(face_class: type) -> set[str]:
        return {name for name in vars(face_class) if not name.startswith("_")}

    assert public(Client) == public(AsyncClient)
    assert public(sdk.GenerationStream) == public(sdk.AsyncGenerationStream)
