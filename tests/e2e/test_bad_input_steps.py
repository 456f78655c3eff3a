"""Malformed messages to a real executor: each ends its session with a status and nothing else.

After each, the same process answers the same step with the same bits, and every block is free.
"""

from __future__ import annotations

import shutil
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from isobatch.executor.v1 import executor_service_pb2 as pb
from isobatch.executor.v1 import token_rows_pb2 as rows_pb
from isobatch.scheduler.v1.scheduler_service_pb2 import GetStatsRequest
from tests.support.executor_harness import OPTIONS, SessionClient, reason_of, step_message
from tests.support.healthy_pair import HealthyPair
from tests.support.services import Service, start_executor
from tests.support.tiny_model import Storage, TinyShape, write_directory
from tests.support.tiny_tokenizer import vocab_size

CODE = grpc.StatusCode
SHAPE = TinyShape(vocab_size=vocab_size(), context_length=128)
FLAGS = (
    "--kv-memory-mb", "1", "--threads", "1", "--max-num-seqs", "4",
    "--max-num-batched-tokens", "16",
)  # fmt: skip
ROWS = [(1, [5, 6, 7], 0), (2, [8], 0)]
INT_MAX = 2**31 - 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_directory(path, SHAPE, Storage(4))
    return path


@pytest.fixture(scope="module")
def executor(model: Path) -> Iterator[Service]:
    folder = Path(tempfile.mkdtemp(prefix="ib-"))
    service = start_executor(folder, model, *FLAGS)
    try:
        yield service
        assert service.process.poll() is None
        assert service.stop() == 0
    finally:
        service.stop()
        shutil.rmtree(folder)


class Stranger:
    """Opens sessions at one executor, each with a higher epoch than the last."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    async def session(self) -> SessionClient:
        """A started session with sequences 1 and 2 open."""
        client = SessionClient(self.channel)
        await client.start(time.time_ns())
        await client.open(1, 2)
        return client

    async def bits(self) -> tuple[bytes, bytes]:
        """What a good step answers; the pool must be free before it."""
        client = SessionClient(self.channel)
        started = await client.start(time.time_ns())
        counts = started.kv_occupancy
        assert counts.free_blocks + counts.evictable_blocks == counts.total_blocks
        await client.open(1, 2)
        statistics = rows_pb.STATISTIC_ARGMAX | rows_pb.STATISTIC_DIGEST
        result = await client.step(step_message(1, ROWS, statistics))
        client.call.cancel()
        return result.argmax_ids, result.digests


@pytest.fixture
async def stranger(executor: Service) -> AsyncIterator[Stranger]:
    async with grpc.aio.insecure_channel(executor.address, options=OPTIONS) as channel:
        stranger = Stranger(channel)
        before = await stranger.bits()
        yield stranger
        assert await stranger.bits() == before


async def _ends(client: SessionClient, code: grpc.StatusCode, reason: str, **message: Any) -> str:
    """Send a message that must end the session; return what was said."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.ask(**message)
    assert caught.value.code() is code, caught.value.details()
    assert reason_of(caught.value) == reason
    return caught.value.details() or ""


def _i32(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def _f32(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


# Changes to a good step of two rows with four tokens and two wanted positions.
STEPS: dict[str, tuple[dict[str, Any], str]] = {
    "half an element": ({"row_sequence_ids": b"\1\0\0"}, "row_sequence_ids"),
    "one generation": ({"row_generations": bytes(4)}, "row_generations"),
    "no positions": ({"row_start_positions": b""}, "row_start_positions"),
    "three lengths": ({"row_num_tokens": _i32(3, 1, 1)}, "row_num_tokens"),
    "negative length": ({"row_num_tokens": _i32(5, -1)}, "row_num_tokens"),
    "zero length": ({"row_num_tokens": _i32(4, 0)}, "row_num_tokens"),
    "lengths that wrap": ({"row_num_tokens": _i32(INT_MAX, INT_MAX)}, "row_num_tokens"),
    "fewer tokens": ({"token_ids": _i32(5, 6, 7)}, "row_num_tokens"),
    "no tokens": ({"token_ids": b""}, "row_num_tokens"),
    "id beyond": ({"token_ids": _i32(5, 6, 7, SHAPE.vocab_size)}, "token_ids"),
    "negative id": ({"token_ids": _i32(-1, 6, 7, 8)}, "token_ids"),
    "negative position": ({"row_start_positions": _i32(-1, 0)}, "row_start_positions"),
    "position with a gap": ({"row_start_positions": _i32(1, 0)}, "row_start_positions"),
    "position that wraps": ({"row_start_positions": _i32(INT_MAX, 0)}, "row_start_positions"),
    "one sequence twice": (
        {"row_sequence_ids": struct.pack("<2Q", 1, 1)}, "row_sequence_ids",
    ),
    "released and used": ({"released_sequence_ids": struct.pack("<Q", 2)}, "row_sequence_ids"),
    "source unknown": ({"row_token_sources": b"\1\7"}, "row_token_sources"),
    "source of no step": (
        {
            "row_token_sources": b"\1\2", "token_ids": _i32(5, 6, 7, 0),
            "row_source_steps": struct.pack("<2Q", 0, 99), "row_source_wanted": _i32(0, 0),
        },
        "row_source_steps",
    ),
    "wanted beyond": ({"wanted_token_indexes": _i32(2, 4)}, "wanted_token_indexes"),
    "wanted negative": ({"wanted_token_indexes": _i32(-1, 3)}, "wanted_token_indexes"),
    "wanted twice": ({"wanted_token_indexes": _i32(3, 3)}, "wanted_token_indexes"),
    "statistics unknown": ({"wanted_statistics": struct.pack("<2I", 1 << 20, 1)},
                           "wanted_statistics"),
    "statistics missing": ({"wanted_statistics": b""}, "wanted_statistics"),
    "top-k without asking": ({"wanted_top_k": _i32(3, 0)}, "wanted_top_k"),
    "temperature not a number": ({"wanted_inverse_temperatures": _f32(np.nan, 1)},
                                 "wanted_inverse_temperatures"),
    "temperature infinite": ({"wanted_inverse_temperatures": _f32(np.inf, 1)},
                             "wanted_inverse_temperatures"),
    "temperature zero": ({"wanted_inverse_temperatures": _f32(1, 0)},
                         "wanted_inverse_temperatures"),
    "quantile of one": ({"wanted_quantiles": _f32(0, 1)}, "wanted_quantiles"),
    "quantile not a number": ({"wanted_quantiles": _f32(np.nan, 0)}, "wanted_quantiles"),
    "edits that wrap": (
        {"edit_starts": _i32(0, INT_MAX, -2), "edit_ids": b"", "edit_values": b""}, "edit_starts",
    ),
    "edit of no id": (
        {"edit_starts": _i32(0, 1, 1), "edit_ids": _i32(-5), "edit_values": _f32(1)}, "edit_ids",
    ),
    "edit not a number": (
        {"edit_starts": _i32(0, 1, 1), "edit_ids": _i32(5), "edit_values": _f32(np.nan)},
        "edit_values",
    ),
    "edits without values": (
        {"edit_starts": _i32(0, 1, 1), "edit_ids": _i32(5), "edit_values": b""}, "edit_values",
    ),
    "names without asking": (
        {"named_starts": _i32(0, 1, 1), "named_ids": _i32(5)}, "named_ids",
    ),
    "a token too many": (
        {"row_num_tokens": _i32(16, 1), "token_ids": _i32(*range(17)),
         "wanted_token_indexes": _i32(15, 16)},
        "tokens",
    ),
    "a million tokens": ({"token_ids": _i32(5) * 1_000_000}, "tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
async def test_a_malformed_step_names_its_field(stranger: Stranger, name: str) -> None:
    changes, field = STEPS[name]
    client = await stranger.session()
    step = step_message(1, ROWS, **changes)
    said = await _ends(client, CODE.INVALID_ARGUMENT, "INVALID_STEP", step=step)
    assert said.startswith(f"[step] {field} ")
    assert ", got " in said


async def test_steps_of_the_wrong_sequence_or_time(stranger: Stranger) -> None:
    cases: list[tuple[rows_pb.Step, grpc.StatusCode, str]] = [
        (step_message(1, [(3, [5], 0)]), CODE.FAILED_PRECONDITION, "SEQUENCE_NOT_OPEN"),
        (
            step_message(1, [(1, [5], 0)], row_generations=struct.pack("<I", 7)),
            CODE.FAILED_PRECONDITION, "SEQUENCE_NOT_OPEN",
        ),
        (step_message(0, ROWS), CODE.FAILED_PRECONDITION, "STEP_OUT_OF_ORDER"),
        (step_message(3, ROWS), CODE.FAILED_PRECONDITION, "STEP_OUT_OF_ORDER"),
        (step_message(2**64 - 1, ROWS), CODE.FAILED_PRECONDITION, "STEP_OUT_OF_ORDER"),
        (step_message(1, ROWS, model_id="other"), CODE.NOT_FOUND, "MODEL_NOT_FOUND"),
        (
            step_message(1, [(each, [5], 0) for each in range(1, 6)]),
            CODE.INVALID_ARGUMENT, "INVALID_STEP",
        ),
    ]  # fmt: skip
    for step, code, reason in cases:
        await _ends(await stranger.session(), code, reason, step=step)


async def test_other_messages_that_break_a_rule(stranger: Stranger) -> None:
    key = rows_pb.SequenceKey
    many = [rows_pb.OpenSequence(key=key(sequence_id=each)) for each in range(10, 20_000)]
    odd = rows_pb.OpenSequence(key=key(sequence_id=9), token_ids=b"\1\2\3")
    other = rows_pb.OpenSequence(key=key(sequence_id=9), model_id="other")
    invalid, missing = CODE.INVALID_ARGUMENT, CODE.FAILED_PRECONDITION
    cases: list[tuple[dict[str, Any], grpc.StatusCode, str]] = [
        ({}, invalid, "INVALID_REQUEST"),
        ({"start": pb.StartSession(scheduler_epoch=1)}, invalid, "INVALID_REQUEST"),
        ({"open": rows_pb.OpenSequences(sequences=[odd])}, invalid, "INVALID_REQUEST"),
        ({"open": rows_pb.OpenSequences(sequences=[other])}, CODE.NOT_FOUND, "MODEL_NOT_FOUND"),
        (
            {"open": rows_pb.OpenSequences(sequences=many)},
            CODE.RESOURCE_EXHAUSTED, "TOO_MANY_SEQUENCES",
        ),
        ({"release": rows_pb.ReleaseSequences(sequence_ids=b"\1")}, invalid, "INVALID_REQUEST"),
        ({"fetch_logits": rows_pb.FetchLogits(step_id=1)}, missing, "LOGITS_NOT_KEPT"),
    ]  # fmt: skip
    for message, code, reason in cases:
        await _ends(await stranger.session(), code, reason, **message)
    client = await stranger.session()
    released = rows_pb.ReleaseSequences(sequence_ids=struct.pack("<Q", 77) * 100_000)
    await client.ask(release=released)
    await client.step(step_message(1, ROWS, rows_pb.STATISTIC_FULL_ROW))
    for wanted in (_i32(2), _i32(-1), _i32(INT_MAX), b"\1\2"):
        fetch = rows_pb.FetchLogits(step_id=1, wanted_indexes=wanted)
        await _ends(client, invalid, "INVALID_REQUEST", fetch_logits=fetch)
        client = await stranger.session()
        await client.step(step_message(1, ROWS, rows_pb.STATISTIC_FULL_ROW))
    # 64 MiB hold this many rows and no more.
    rows = _i32(0) * ((64 << 20) // (4 * SHAPE.vocab_size))
    fetch = rows_pb.FetchLogits(step_id=1, wanted_indexes=rows)
    await _ends(client, invalid, "INVALID_REQUEST", fetch_logits=fetch)


async def test_b46_a_message_over_64_mib_ends_the_stream_alone(executor: Service) -> None:
    options = [*OPTIONS[2:], ("grpc.max_send_message_length", 128 << 20)]
    async with grpc.aio.insecure_channel(executor.address, options=options) as channel:
        client = await Stranger(channel).session()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.ask(step=step_message(1, ROWS, token_ids=bytes(65 << 20)))
        assert caught.value.code() is CODE.RESOURCE_EXHAUSTED
        await Stranger(channel).bits()


async def test_strangers_without_a_higher_epoch_disturb_no_stream(
    running: HealthyPair, stub: Any
) -> None:
    """A session that does not start, or starts below the live one's epoch, fences nobody."""
    invalid = CODE.INVALID_ARGUMENT
    cases: list[tuple[dict[str, Any], grpc.StatusCode, str]] = [
        ({}, invalid, "INVALID_REQUEST"),
        ({"step": step_message(1, ROWS)}, invalid, "INVALID_REQUEST"),
        ({"start": pb.StartSession(scheduler_epoch=0)}, invalid, "INVALID_REQUEST"),
        (
            {"start": pb.StartSession(scheduler_epoch=5)}, CODE.FAILED_PRECONDITION, "STALE_EPOCH",
        ),
    ]  # fmt: skip
    address = running.pair.executor.address
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        for message, code, reason in cases * 10:
            await _ends(SessionClient(channel), code, reason, **message)
    assert not (await stub.GetStats(GetStatsRequest())).num_executor_reconnects
