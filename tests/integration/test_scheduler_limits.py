"""What one client may do to the service that all share: bounds found by trying to break it."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from isobatch.executor.v1 import token_rows_pb2
from isobatch.scheduler.v1 import sampling_pb2
from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from scheduler_service import server, step_loop
from scheduler_service.client._channel import channel_options
from scheduler_service.errors import MAX_MESSAGE_BYTES, ConfigurationError
from scheduler_service.text.tokenizer import Tokenizer
from scheduler_service.wire.api import MAX_CHAT_MESSAGES, MAX_LOGIT_BIASES, MAX_SALT_LENGTH
from tests.support.bystanders import refused
from tests.support.fake_executor import FakeExecutor
from tests.support.scheduler_harness import Harness, running, socket_folder, until
from tests.support.tiny_tokenizer import tokenizer_source, vocab_size
from tests.support.toy_model import ToyModel

CODE = grpc.StatusCode
LONG = "x" * 100_000
TEN = sampling_pb2.StoppingParams(max_tokens=10, ignore_eos=True)


@pytest.mark.parametrize(
    ("request_fields", "code", "reason"),
    [
        ({"text": "x", "model": LONG}, CODE.NOT_FOUND, "UNKNOWN_MODEL"),
        (
            {"chat": pb.Chat(messages=[pb.ChatMessage(role="\u65e5" * 30_000, content="x")])},
            CODE.INVALID_ARGUMENT,
            "INVALID_PROMPT",
        ),
        ({"text": "x", "request_id": LONG}, CODE.INVALID_ARGUMENT, "INVALID_PARAMETER"),
    ],
    ids=["model", "role", "request_id"],
)
async def test_an_error_that_quotes_a_long_value_arrives(
    request_fields: dict[str, Any], code: grpc.StatusCode, reason: str
) -> None:
    """gRPC bounds trailers; a status beyond that bound would reach nobody."""
    async with running() as harness:
        found = await refused(harness.generate(**request_fields))
        assert (found.code, found.reason) == (code, reason)
        assert len(found.message.encode()) <= MAX_MESSAGE_BYTES


@contextlib.contextmanager
def _longest_pause() -> Iterator[list[float]]:
    """How long another thread had to wait for its turn, in seconds; known after the block."""
    found, is_over = [0.0], threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not is_over.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            found[0] = max(found[0], now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()


def test_encoding_a_long_prompt_lets_streams_go_on() -> None:
    tokenizer = Tokenizer(tokenizer_source())
    text = "the quick brown fox " * 25_000
    with _longest_pause() as pause:
        started = time.perf_counter()
        ids = tokenizer.encode_text(text)
        seconds = time.perf_counter() - started
    assert tokenizer.decode(ids) == text
    assert pause[0] < seconds / 2


async def test_a_conversation_of_many_empty_turns_is_no_work_for_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[bool] = []
    encode_chat = Tokenizer.encode_chat

    def watched(self: Tokenizer, turns: Any) -> tuple[list[int], str]:
        threads.append(threading.current_thread() is threading.main_thread())
        return encode_chat(self, turns)

    monkeypatch.setattr(Tokenizer, "encode_chat", watched)
    async with running() as harness:
        for num_turns in (1, 2000):
            turns = [pb.ChatMessage(role="user", content="")] * num_turns
            await harness.stub.Tokenize(pb.TokenizeRequest(chat=pb.Chat(messages=turns)))
    assert threads == [True, False]


async def test_a_conversation_without_end_is_refused_unread() -> None:
    turns = [pb.ChatMessage(role="user", content="")] * (MAX_CHAT_MESSAGES + 1)
    chat = pb.Chat(messages=turns)
    async with running() as harness:
        calls: list[Any] = [
            harness.generate(chat=chat),
            harness.stub.Tokenize(pb.TokenizeRequest(chat=chat)),
        ]
        for call in calls:
            found = await refused(call)
            assert (found.code, found.fields) == (CODE.INVALID_ARGUMENT, ("chat",))
            assert found.message.endswith(f"got {MAX_CHAT_MESSAGES + 1}")


async def test_text_that_the_model_has_no_tokens_for_is_refused() -> None:
    """A tokenizer may know more tokens than its model; such a step would be refused for ever."""
    fake = FakeExecutor(model=ToyModel(vocab_size() - 20))
    tokenizer = Tokenizer(tokenizer_source())
    known, unknown = "q", "\u65e5\u672c\u8a9e stopping straße"
    limit = fake.model.vocab_size
    assert max(tokenizer.encode_text(known)) < limit <= max(tokenizer.encode_text(unknown))
    async with running(fake) as harness:
        calls: list[tuple[str, Any]] = [
            ("text", harness.generate(text=unknown)),
            ("chat", harness.generate(chat=pb.Chat(messages=[
                pb.ChatMessage(role="user", content=unknown)]))),
            ("text", harness.stub.Tokenize(pb.TokenizeRequest(text=unknown))),
        ]  # fmt: skip
        for field, call in calls:
            found = await refused(call)
            assert (found.code, found.reason) == (CODE.INVALID_ARGUMENT, "INVALID_PROMPT")
            assert found.fields == (field,)
        assert len((await harness.complete(text=known, stopping=TEN)).token_ids) == 10
        assert harness.server.engine.totals.num_executor_reconnects == 0


async def test_b17_no_request_makes_a_step_too_large_for_the_wire() -> None:
    """Biases travel with every step: as many as the vocabulary has, for 256 rows, do not fit."""
    async with running() as harness:
        for count, works in ((min(MAX_LOGIT_BIASES, vocab_size()), True), (1025, False)):
            sampling = sampling_pb2.SamplingParams(logit_bias=dict.fromkeys(range(count), 1.0))
            if works:
                await harness.complete(text="x", sampling=sampling, stopping=TEN)
                continue
            found = await refused(harness.generate(text="x", sampling=sampling))
            assert (found.code, found.fields) == (CODE.INVALID_ARGUMENT, ("sampling.logit_bias",))
    step_bytes = 256 * MAX_LOGIT_BIASES * 8
    assert step_bytes < 64 << 20


async def test_b46_a_salt_is_short_enough_to_open_all_sequences_at_once() -> None:
    """After a restart of the executor every live request is announced in one message."""
    async with running() as harness:
        await harness.complete(text="x", cache_salt="\u65e5" * MAX_SALT_LENGTH, stopping=TEN)
        found = await refused(harness.generate(text="x", cache_salt="s" * 3_000_000))
        assert (found.code, found.fields) == (CODE.INVALID_ARGUMENT, ("cache_salt",))


async def test_b46_full_rows_are_fetched_in_parts_that_fit_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 MiB hold 110 rows of a vocabulary of 151,936; a step may need 256."""
    fields: dict[str, Any] = {
        "sampling": sampling_pb2.SamplingParams(temperature=5.0, top_p=0.99, seed=3),
        "stopping": TEN,
    }
    prompts = [pb.TokenIds(ids=[first, 4]) for first in range(10, 17)]

    async def answers(fake: FakeExecutor) -> list[list[int]]:
        async with running(fake) as harness:
            outputs = await asyncio.gather(
                *(harness.complete(token_ids=ids, **fields) for ids in prompts)
            )
            return [output.token_ids for output in outputs]

    whole = FakeExecutor(max_top_k=4)
    expected = await answers(whole)
    assert whole.num_fetched_rows == 70
    monkeypatch.setattr(step_loop, "_MAX_FETCHED_LOGITS", 3 * vocab_size() - 1)
    parts = _Counting(max_top_k=4)
    assert await answers(parts) == expected
    assert parts.num_fetched_rows == 70
    assert max(parts.sizes) == 2


class _Counting(FakeExecutor):
    """Remembers how many rows each FetchLogits asked for."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.sizes: list[int] = []

    def _fetch(self, request: token_rows_pb2.FetchLogits) -> token_rows_pb2.LogitsFetched:
        self.sizes.append(len(request.wanted_indexes) // 4)
        return super()._fetch(request)


async def test_b43_a_frozen_executor_is_noticed_and_may_come_back() -> None:
    """Its socket stays open, so only the missing answer tells. The step is computed once."""
    fake = FakeExecutor()
    thawed = asyncio.Event()

    async def freeze(step: token_rows_pb2.Step) -> None:
        if step.step_id >= 5:
            await thawed.wait()

    async with running(fake, step_timeout_seconds=0.2) as harness:
        expected = (await harness.complete(text="x", stopping=TEN)).token_ids
        await harness.wait_idle()
        fake.before_step = freeze
        call = asyncio.create_task(harness.complete(text="x", stopping=TEN))
        await harness.wait_serving(False)
        assert not call.done()
        thawed.set()
        assert (await call).token_ids == expected
        await harness.wait_serving()
        await harness.wait_idle()
        assert harness.metric("requests_running") == 0
    assert fake.computed_step_ids == sorted(set(fake.computed_step_ids))


async def test_b37_no_task_outlives_its_call() -> None:
    """Ended, refused, cancelled after any number of messages, or past a deadline."""

    async def cycle(harness: Harness) -> None:
        await harness.complete(text="x", stopping=TEN)
        await refused(harness.generate(text=""))
        await refused(harness.generate(text="x", model="other"))
        await refused(harness.generate(text="x", timeout=0.01))
        for num_messages in range(5):
            call = harness.generate(text="x")
            for _ in range(num_messages):
                await call.read()
            call.cancel()
        await harness.wait_idle()

    async with running(FakeExecutor(step_seconds=0.002)) as harness:
        await cycle(harness)
        before = len(_tasks_of_calls())
        for _ in range(5):
            await cycle(harness)
        left: list[str] = []

        async def is_back() -> bool:
            left[:] = _tasks_of_calls()
            # The step loop and the session have some more while they wait than while they work;
            # one task left of each cycle would be five.
            return len(left) <= before + 4

        try:
            await until(is_back)
        except TimeoutError:
            pytest.fail(f"{before} tasks became:\n" + "\n".join(left))
        assert _num_streams(harness) == 0


def _tasks_of_calls() -> list[str]:
    """Return all tasks but those with which gRPC waits for calls: it starts these as it likes."""
    return [text for text in map(repr, asyncio.all_tasks()) if "coro=<AioServer." not in text]


def _num_streams(harness: Harness) -> int:
    served = harness.server.engine.served
    assert served is not None
    return len(served.loop.fan_out.streams)


async def test_b50_a_socket_whose_process_takes_no_connection_is_in_use() -> None:
    """A stopped process answers nobody, and yet its socket is not to be stolen, nor waited for."""
    with socket_folder() as folder, contextlib.ExitStack() as stack:
        path = folder / "s.sock"
        taken = stack.enter_context(socket.socket(socket.AF_UNIX))
        taken.bind(str(path))
        taken.listen(0)
        for _ in range(2):
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            waiting.connect_ex(str(path))
        async with asyncio.timeout(10):
            with pytest.raises(ConfigurationError, match="another process serves"):
                async with running(listen=f"unix:{path}"):
                    pass
        assert path.is_socket()


def test_b47_clients_ping_less_often_than_the_server_allows() -> None:
    """A server that gets pings too often closes the connection, streams and all."""
    allowed = dict(server._TCP_OPTIONS)
    sent = dict(channel_options("127.0.0.1:9"))
    least = allowed["grpc.http2.min_recv_ping_interval_without_data_ms"]
    assert int(sent["grpc.keepalive_time_ms"]) >= 2 * int(least)
    assert sent["grpc.keepalive_permit_without_calls"] == 0
    assert "grpc.keepalive_time_ms" not in dict(channel_options("unix:/s.sock"))
