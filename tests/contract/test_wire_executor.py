"""Bytes of the executor's contract: what is sent, and which answers are refused."""

import numpy as np
import pytest

from isobatch.executor.v1 import capabilities_pb2, token_rows_pb2
from isobatch.executor.v1 import executor_service_pb2 as pb
from scheduler_service.core import (
    KvCounts,
    RequestId,
    SamplingParams,
    SequenceId,
    SequenceOpened,
    SequenceOpening,
    TokenRow,
    TokenRowBatch,
    TokenSource,
    TokenSourceKind,
    WantedPosition,
)
from scheduler_service.sampling import Statistic, WantedStatistics
from scheduler_service.wire import executor as wire
from scheduler_service.wire.capabilities import WireError, read_capabilities, read_tokenizer

V = 9
PARAMS = SamplingParams()
ROWS = (
    TokenRow(RequestId("a"), SequenceId(2**63 + 5), 2**31 + 1, (7, 8, 1), 4,
             (WantedPosition(2, 7, PARAMS),)),
    TokenRow(RequestId("b"), SequenceId(2), 0, (3,), 9, ()),
    TokenRow(RequestId("c"), SequenceId(3), 1, (0,), 11, (WantedPosition(0, 12, PARAMS),),
             TokenSource(TokenSourceKind.STEP_OUTPUT, 40, 1)),
)  # fmt: skip
BATCH = TokenRowBatch(41, "m", ROWS, released_sequence_ids=(SequenceId(9), SequenceId(2**64 - 1)))
QUESTIONS = [
    WantedStatistics(Statistic.TOP_K | Statistic.NORMALIZER | Statistic.DIGEST, 2, 0.5, 0.25,
                     ((4, -1.5), (6, 100.0))),
    WantedStatistics(Statistic.ARGMAX),
]  # fmt: skip


def _list(data: bytes, dtype: str) -> list[float]:
    values: list[float] = np.frombuffer(data, dtype).tolist()
    return values


def test_every_array_of_a_step() -> None:
    step = pb.SessionRequest.FromString(wire.step(BATCH, QUESTIONS).SerializeToString()).step
    assert (step.step_id, step.model_id) == (41, "m")
    assert _list(step.released_sequence_ids, "<u8") == [9, 2**64 - 1]
    assert _list(step.row_sequence_ids, "<u8") == [2**63 + 5, 2, 3]
    assert _list(step.row_generations, "<u4") == [2**31 + 1, 0, 1]
    assert _list(step.row_start_positions, "<i4") == [4, 9, 11]
    assert _list(step.row_num_tokens, "<i4") == [3, 1, 1]
    assert list(step.row_token_sources) == [1, 1, 2]
    assert _list(step.row_source_steps, "<u8") == [0, 0, 40]
    assert _list(step.row_source_wanted, "<i4") == [0, 0, 1]
    assert _list(step.token_ids, "<i4") == [7, 8, 1, 3, 0]
    assert _list(step.wanted_token_indexes, "<i4") == [2, 4]
    assert _list(step.wanted_statistics, "<u4") == [
        token_rows_pb2.STATISTIC_TOP_K | token_rows_pb2.STATISTIC_NORMALIZER
        | token_rows_pb2.STATISTIC_DIGEST,
        token_rows_pb2.STATISTIC_ARGMAX,
    ]  # fmt: skip
    assert _list(step.wanted_top_k, "<i4") == [2, 0]
    assert _list(step.wanted_inverse_temperatures, "<f4") == [0.5, 1.0]
    assert _list(step.wanted_quantiles, "<f4") == [0.25, 0.0]
    assert _list(step.edit_starts, "<i4") == [0, 2, 2]
    assert _list(step.edit_ids, "<i4") == [4, 6]
    assert _list(step.edit_values, "<f4") == [-1.5, 100.0]
    assert not step.named_starts


def test_literal_rows_without_edits_leave_their_arrays_out() -> None:
    batch = TokenRowBatch(1, "m", ROWS[:1])
    step = wire.step(batch, [WantedStatistics(Statistic.ARGMAX)]).step
    assert not step.row_token_sources
    assert not step.edit_starts


def test_a_step_that_only_gives_back() -> None:
    step = wire.step(TokenRowBatch(3, "m", (), released_sequence_ids=(SequenceId(1),)), []).step
    assert _list(step.released_sequence_ids, "<u8") == [1]
    assert not step.row_sequence_ids


def test_statistics_have_the_contract_s_values() -> None:
    for flag in Statistic:
        assert token_rows_pb2.Statistic.Value(f"STATISTIC_{flag.name}") == flag.value


def test_openings() -> None:
    opening = SequenceOpening(RequestId("a"), SequenceId(5), 3, "m", "salt", (1, 2))
    (sent,) = wire.open_sequences([opening]).open.sequences
    assert (sent.key.sequence_id, sent.key.generation) == (5, 3)
    # Logits are wanted at the last token, so that one is always computed.
    assert (sent.model_id, sent.cache_salt, sent.max_cached_tokens) == ("m", "salt", 1)
    assert _list(sent.token_ids, "<i4") == [1, 2]


def _opened(sequence_id: int = 5, num_cached_tokens: int = 16) -> pb.SessionResponse:
    opened = token_rows_pb2.SequencesOpened(
        kv_occupancy=token_rows_pb2.KvOccupancy(
            total_blocks=9, free_blocks=4, evictable_blocks=3, shared_blocks=2
        )
    )
    key = token_rows_pb2.SequenceKey(sequence_id=sequence_id, generation=3)
    opened.sequences.add(key=key, num_cached_tokens=num_cached_tokens, provenance_handle=7)
    return pb.SessionResponse(opened=opened)


OPENING = SequenceOpening(RequestId("a"), SequenceId(5), 3, "m", "", tuple(range(17)))


def test_the_answer_to_openings() -> None:
    answers, counts = wire.read_opened(_opened(), [OPENING])
    assert answers == [SequenceOpened(RequestId("a"), SequenceId(5), 3, 16, 7)]
    assert counts == KvCounts(total=9, free=4, evictable=3, shared=2)


def test_wrong_answers_to_openings_are_refused() -> None:
    with pytest.raises(WireError, match=r"\(5, 3\) was asked for, got \(6, 3\)"):
        wire.read_opened(_opened(sequence_id=6), [OPENING])
    with pytest.raises(WireError, match=r"at most 16 cached tokens .* got 17"):
        wire.read_opened(_opened(num_cached_tokens=17), [OPENING])
    with pytest.raises(WireError, match="2 sequences were asked for, got 1"):
        wire.read_opened(_opened(), [OPENING, OPENING])


def _result(**changes: object) -> pb.SessionResponse:
    fields: dict[str, object] = {
        "step_id": 41,
        "outcome": token_rows_pb2.STEP_OUTCOME_COMPUTED,
        "row_outcomes": bytes([1, 1, 1]),
        "argmax_ids": np.array([-1, 5], "<i4").tobytes(),
        "max_logits": np.array([1.5, 2.5], "<f4").tobytes(),
        "quantile_ids": np.array([-1, -1], "<i4").tobytes(),
        "normalizers": np.array([3.5, 0], "<f4").tobytes(),
        "top_k_starts": np.array([0, 2, 2], "<i4").tobytes(),
        "top_k_ids": np.array([8, 3], "<i4").tobytes(),
        "top_k_logits": np.array([1.5, 1.25], "<f4").tobytes(),
        "top_k_weights": np.array([1.0, 0.75], "<f4").tobytes(),
        "digests": b"d" * 16 + b"\0" * 16,
        "timings": token_rows_pb2.StepTimings(total_ns=2_000_000_000),
        "kv_occupancy": token_rows_pb2.KvOccupancy(
            total_blocks=4, free_blocks=3, evictable_blocks=2, shared_blocks=1
        ),
    } | changes
    return pb.SessionResponse(step_result=token_rows_pb2.StepResult(**fields))  # type: ignore[arg-type]


def test_every_array_of_an_answer() -> None:
    reply = wire.read_step(_result(), BATCH, QUESTIONS, V)
    assert reply.executor_seconds == 2.0
    counts = reply.kv_counts
    assert (counts.total, counts.free, counts.evictable, counts.shared) == (4, 3, 2, 1)
    answer = reply.answer
    assert answer is not None
    assert answer.row_errors == (None, None, None)
    assert answer.digests == (b"d" * 16, b"")
    top, greedy = answer.statistics
    assert top.top_k_ids is not None
    assert top.top_k_weights is not None
    assert top.top_k_ids.tolist() == [8, 3]
    assert top.top_k_weights.tolist() == [1.0, 0.75]
    assert (top.normalizer, top.vocab_size) == (3.5, V)
    assert (greedy.argmax_id, greedy.max_logit, greedy.top_k_ids) == (5, 2.5, None)


def test_rows_that_are_not_finite_name_their_layer() -> None:
    response = _result(row_outcomes=bytes([1, 2, 2]), non_finite_details=["layer 1", "layer 2"])
    answer = wire.read_step(response, BATCH, QUESTIONS, V).answer
    assert answer is not None
    first, second, third = answer.row_errors
    assert first is None
    assert "layer 1" in str(second)
    assert "layer 2" in str(third)


def test_no_capacity_has_no_answer() -> None:
    response = _result(outcome=token_rows_pb2.STEP_OUTCOME_NO_CAPACITY, row_outcomes=b"")
    assert wire.read_step(response, BATCH, QUESTIONS, V).answer is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_id": 40}, "step_id must be 41, got 40"),
        ({"outcome": 0}, "outcome must be set"),
        ({"row_outcomes": bytes([1, 1])}, "row_outcomes must have 3 bytes, got 2"),
        ({"row_outcomes": bytes([1, 1, 0])}, "row_outcomes must be set"),
        ({"argmax_ids": b"\0" * 4}, "argmax_ids must have 8 bytes, got 4"),
        ({"max_logits": b""}, "max_logits"),
        ({"quantile_ids": b"\0" * 12}, "quantile_ids"),
        ({"normalizers": b"\0"}, "normalizers"),
        ({"top_k_starts": b""}, "top_k_starts"),
        ({"top_k_starts": np.array([0, 1, 2], "<i4").tobytes()}, "top-K must have 2 entries"),
        ({"top_k_weights": b"\0" * 4}, "top_k_weights"),
        ({"digests": b"d" * 16}, "digests must have 32 bytes"),
    ],
)
def test_answers_that_break_the_contract_are_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(WireError, match=message):
        wire.read_step(_result(**changes), BATCH, QUESTIONS, V)


def test_answers_of_another_kind_are_refused() -> None:
    with pytest.raises(WireError, match="must be started, got step_result"):
        wire.read_started(_result())
    with pytest.raises(WireError, match="must be step_result, got started"):
        wire.read_step(pb.SessionResponse(started=pb.SessionStarted()), BATCH, QUESTIONS, V)
    with pytest.raises(WireError, match="must be opened, got step_result"):
        wire.read_opened(_result(), [OPENING])


def test_full_rows() -> None:
    assert _list(wire.fetch_logits(41, [0, 1]).fetch_logits.wanted_indexes, "<i4") == [0, 1]
    logits = np.arange(2 * V, dtype="<f4")
    fetched = token_rows_pb2.LogitsFetched(
        step_id=41, logits=token_rows_pb2.TensorPayload(inline=logits.tobytes())
    )
    rows = wire.read_logits(pb.SessionResponse(logits_fetched=fetched), 41, 2, V)
    assert rows.tolist() == logits.reshape(2, V).tolist()
    with pytest.raises(WireError, match="step_id"):
        wire.read_logits(pb.SessionResponse(logits_fetched=fetched), 42, 2, V)
    with pytest.raises(WireError, match="logits must have"):
        wire.read_logits(pb.SessionResponse(logits_fetched=fetched), 41, 3, V)


def test_capabilities() -> None:
    reply = pb.GetCapabilitiesResponse(executor_epoch=7)
    assert read_capabilities(reply) is None
    reply.ready = True
    reply.models.add(model_id="draft", role=capabilities_pb2.MODEL_ROLE_DRAFT)
    with pytest.raises(WireError, match="must have a target model"):
        read_capabilities(reply)
    model = reply.models.add(
        model_id="big", role=capabilities_pb2.MODEL_ROLE_TARGET, vocab_size=V, context_length=1,
        block_size=1,
    )  # fmt: skip
    reply.max_num_seqs = reply.max_num_batched_tokens = reply.max_top_k = 1
    with pytest.raises(WireError, match="num_blocks must be at least 1, got 0"):
        read_capabilities(reply)
    model.num_blocks = 1
    capabilities = read_capabilities(reply)
    assert capabilities is not None
    assert (capabilities.model.model_id, capabilities.model.vocab_size) == ("big", V)


def test_the_begin_token_may_be_absent_or_zero() -> None:
    assert read_tokenizer(pb.GetTokenizerResponse()).bos_token_id is None
    assert read_tokenizer(pb.GetTokenizerResponse(bos_token_id=0)).bos_token_id == 0
