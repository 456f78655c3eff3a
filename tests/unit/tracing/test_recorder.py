"""One request's recorder: what closes a trace, and what it then holds."""

from __future__ import annotations

from scheduler_service.core import Request, RequestId, SamplingParams
from scheduler_service.tracing.model import NO_DIGEST, chained
from scheduler_service.tracing.recorder import Recorder
from scheduler_service.wire import trace as wire
from tests.support.traces import HEADER, make_trace

TRACE = make_trace(tuple(range(100, 106)))


def _recorder() -> tuple[Recorder, list[tuple[str, bytes]]]:
    request = Request(RequestId("r"), (1, 2), SamplingParams(), 50)
    saved: list[tuple[str, bytes]] = []
    recorder = Recorder(request)
    recorder.begin(HEADER, lambda name, data: saved.append((name, data)))
    return recorder, saved


def test_a_trace_closes_when_the_request_has_ended_and_its_state_is_given_back() -> None:
    recorder, saved = _recorder()
    pieces = [recorder.take()]
    for step in TRACE.steps:
        recorder.step(step)
        recorder.request.output_token_ids.append(step.tokens[0].token_id)
        pieces.append(recorder.take())
    recorder.end("length")
    assert not recorder.closed.is_set()
    assert not saved
    recorder.released(None)
    assert recorder.closed.is_set()
    pieces.append(recorder.take())
    ((name, data),) = saved
    assert (name, data) == ("r", b"".join(pieces))
    assert recorder.num_bytes == len(data)
    trace = wire.read(data)
    assert (trace.header, trace.steps) == (HEADER, TRACE.steps)
    assert trace.end == TRACE.end


def test_the_order_of_end_and_release_does_not_matter() -> None:
    recorder, saved = _recorder()
    recorder.step(TRACE.steps[0])
    recorder.released(None)
    assert not recorder.closed.is_set()
    recorder.end("cancelled")
    assert recorder.closed.is_set()
    recorder.released(None)
    recorder.end("length")
    assert len(saved) == 1


def test_a_request_that_never_ran_closes_at_its_end() -> None:
    recorder, saved = _recorder()
    recorder.end("deadline")
    ending = wire.read(saved[0][1]).end
    assert ending is not None
    assert (ending.outcome, ending.num_tokens, ending.logits_digest) == ("deadline", 0, NO_DIGEST)


def test_tokens_drawn_after_a_stop_string_do_not_count() -> None:
    recorder, saved = _recorder()
    for step in TRACE.steps:
        recorder.step(step)
    recorder.request.output_token_ids.extend([100, 101])
    recorder.released(None)
    recorder.end("stop")
    trace = wire.read(saved[0][1])
    digests = [token.logits_digest for token, _ in trace.tokens]
    assert len(digests) == 2
    assert trace.end is not None
    assert trace.end.logits_digest == chained(NO_DIGEST, digests)
