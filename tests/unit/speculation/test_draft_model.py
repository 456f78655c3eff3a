"""What is asked of the draft model for a sequence, and what becomes of its answer."""

from __future__ import annotations

import pytest

from isobatch.executor.v1 import drafts_pb2
from isobatch.executor.v1 import executor_service_pb2 as pb
from scheduler_service.core import Request, RequestId, SamplingParams, SequenceId
from scheduler_service.speculation import (
    DraftedRow,
    DraftEnd,
    DraftModelProposer,
    DraftReply,
    DraftRow,
    DraftWork,
    ProposerKind,
)
from scheduler_service.speculation.draft_model import WAIT_FOR_ROOM, WINDOW
from scheduler_service.wire.capabilities import WireError
from scheduler_service.wire.drafts import draft, read_drafted


def make_request(num_prompt: int) -> Request:
    """A request that decodes."""
    request = Request(RequestId("a"), tuple(range(num_prompt)), SamplingParams(), 500)
    request.sequence_id = SequenceId(7)
    return request


def answer(
    proposer: DraftModelProposer, row: DraftRow, *token_ids: int, end: DraftEnd = DraftEnd.COMPUTED
) -> None:
    """Let the executor answer a row."""
    known = row.end if end is DraftEnd.COMPUTED else 0
    came = DraftedRow(end, known, token_ids, (0.5,) * len(token_ids))
    proposer.take(DraftWork((row,)), DraftReply((came,)))


def test_a_sequence_is_followed_from_proposal_to_proposal() -> None:
    proposer, request = DraftModelProposer(4, 100, 1000), make_request(10)
    assert proposer.num_missing(request) == 10
    row = proposer.row(request, 3, 0.25)
    assert (row.start_position, row.token_ids) == (0, tuple(range(10)))
    assert (row.max_drafts, row.min_confidence) == (3, 0.25)
    answer(proposer, row, 50, 51, 52)
    proposal = proposer.propose(request, 8)
    assert (proposal.token_ids, proposal.kind) == ((50, 51, 52), ProposerKind.DRAFT)
    assert proposer.propose(request, 2).confidences == (0.5, 0.5)
    # It is asked once for what it knows.
    assert not proposer.can_draft(request)
    # Two were right, and the third one was drawn in another's place.
    request.output_token_ids += [50, 51, 60]
    assert proposer.propose(request, 8).token_ids == ()
    assert proposer.can_draft(request)
    assert proposer.num_missing(request) == 1
    row = proposer.row(request, 3)
    assert (row.start_position, row.token_ids) == (10, (50, 51, 60))
    # The last draft of all is never computed.
    answer(proposer, row, 1, 2)
    request.output_token_ids += [1, 2, 3]
    assert proposer.num_missing(request) == 2
    proposer.forget(request.sequence_id)
    assert len(proposer) == 0


def test_it_begins_a_few_tokens_before_the_end_and_anew_after_a_long_pause() -> None:
    proposer, request = DraftModelProposer(4, 500, 1000), make_request(300)
    assert proposer.num_missing(request) == WINDOW
    row = proposer.row(request, 3)
    assert (row.start_position, row.token_ids) == (0, tuple(range(300 - WINDOW, 300)))
    answer(proposer, row, 5)
    request.output_token_ids += [400]
    row = proposer.row(request, 3)
    assert (row.start_position, row.token_ids) == (WINDOW, (400,))
    request.output_token_ids += range(WINDOW)
    assert proposer.num_missing(request) == WINDOW
    row = proposer.row(request, 3)
    assert (row.start_position, row.token_ids) == (0, tuple(range(WINDOW)))


def test_it_begins_anew_where_the_draft_model_has_no_more_positions() -> None:
    proposer, request = DraftModelProposer(4, 100, 40), make_request(15)
    for token in range(60):
        row = proposer.row(request, 3)
        assert row.end <= 40
        answer(proposer, row, 5)
        request.output_token_ids.append(token)


@pytest.mark.parametrize("end", [DraftEnd.FAILED, DraftEnd.NO_CAPACITY, DraftEnd.BEHIND])
def test_troubles(end: DraftEnd) -> None:
    proposer, request = DraftModelProposer(4, 100, 1000), make_request(10)
    answer(proposer, proposer.row(request, 3), end=end)
    assert proposer.propose(request, 8).token_ids == ()
    assert proposer.can_draft(request) is (end is DraftEnd.BEHIND)
    request.output_token_ids += range(WAIT_FOR_ROOM)
    assert proposer.can_draft(request) is (end is not DraftEnd.FAILED)
    # Another generation has nothing to do with it.
    request.generation += 1
    assert proposer.can_draft(request)
    assert proposer.row(request, 3).start_position == 0


def drafted(**changes: bytes) -> pb.SessionResponse:
    """An answer for one row of three tokens and up to two drafts."""
    message = drafts_pb2.TokensDrafted(
        row_outcomes=b"\x01", row_num_computed=b"\x03\0\0\0", row_num_drafts=b"\x02\0\0\0",
        token_ids=b"\x08\0\0\0\x09\0\0\0", confidences=b"\0\0\x80\x3f\0\0\0\x3f",
    )  # fmt: skip
    for name, value in changes.items():
        setattr(message, name, value)
    return pb.SessionResponse(drafted=message)


def test_answers_are_read_and_those_that_break_the_contract_are_refused() -> None:
    work = DraftWork((DraftRow(SequenceId(7), 1, 0, (3, 4, 5), 2, 0.5),))
    message = draft(work).draft
    assert (message.row_sequence_ids[:1], message.row_generations[:1]) == (b"\x07", b"\x01")
    assert read_drafted(drafted(), work, 10).rows == (
        DraftedRow(DraftEnd.COMPUTED, 3, (8, 9), (1.0, 0.5)),
    )
    for changes in (
        {"row_outcomes": b"\x09"}, {"row_outcomes": b""}, {"row_num_computed": b"\x04\0\0\0"},
        {"row_num_drafts": b"\x03\0\0\0"}, {"token_ids": b"\x08\0\0\0"},
        {"token_ids": b"\x08\0\0\0\x0a\0\0\0"}, {"confidences": b"\0\0\0\x40\0\0\0\x3f"},
        {"confidences": b"\0\0\xc0\x7f\0\0\0\x3f"},
    ):  # fmt: skip
        with pytest.raises(WireError, match=r"\[drafted\] .* got "):
            read_drafted(drafted(**changes), work, 10)
    with pytest.raises(WireError, match="must be drafted, got step_result"):
        read_drafted(pb.SessionResponse(step_result={}), work, 10)
