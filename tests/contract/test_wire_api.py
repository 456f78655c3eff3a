"""The public contract: defaults of unset fields, and what goes out."""

from typing import Any

import pytest

from isobatch.scheduler.v1 import sampling_pb2
from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from scheduler_service.core import FinishReason, Priority, Request, RequestId, SamplingParams
from scheduler_service.errors import InvalidRequestError
from scheduler_service.streams import Delta, Ending
from scheduler_service.text.chat_template import ChatTurn
from scheduler_service.wire import api

V = 100


def test_unset_fields_mean_their_defaults() -> None:
    options = api.read_generate(pb.GenerateRequest(), V)
    params = options.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.0, 0, 1.0, 0.0)
    assert options.max_tokens > 1_000_000
    assert (options.stops, options.stop_token_ids, options.ignore_eos) == ((), frozenset(), False)
    again = api.read_generate(pb.GenerateRequest(), V)
    assert options.request_id != again.request_id
    assert params.seed != again.params.seed


def test_zero_is_kept_where_it_was_set() -> None:
    sampling = sampling_pb2.SamplingParams(top_p=0.0, seed=0)
    params = api.read_sampling(sampling)
    assert (params.top_p, params.seed) == (0.0, 0)


def test_everything_that_was_set_arrives() -> None:
    request = pb.GenerateRequest(
        request_id="i",
        sampling=sampling_pb2.SamplingParams(
            temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=2**64 - 1,
            logit_bias={9: 1.5, 3: -2.0},
        ),
        stopping=sampling_pb2.StoppingParams(
            max_tokens=5, stop=["x", "y"], stop_token_ids=[4, 99], ignore_eos=True
        ),
        include_special_tokens=True,
        cache_salt="tenant",
        coalesce_ms=25,
        return_logits_digests=True,
        trace=True,
        trace_kv=True,
        priority=pb.PRIORITY_BATCH,
        client_id="me",
        num_samples=1,
        disable_speculation=True,
    )  # fmt: skip
    assert api.read_generate(request, V) == api.GenerateOptions(
        request_id="i",
        params=SamplingParams(0.5, 7, 0.25, 0.125, 2**64 - 1, ((3, -2.0), (9, 1.5))),
        max_tokens=5,
        stops=("x", "y"),
        stop_token_ids=frozenset({4, 99}),
        ignore_eos=True,
        include_special_tokens=True,
        cache_salt="tenant",
        coalesce_seconds=0.025,
        return_logits_digests=True,
        trace=True,
        trace_kv=True,
        priority=Priority.BATCH,
        client_id="me",
        num_samples=1,
        disable_speculation=True,
    )


def test_the_policy_fields_have_defaults_and_bounds() -> None:
    options = api.read_generate(pb.GenerateRequest(), V)
    assert (options.priority, options.num_samples) == (Priority.NORMAL, 1)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"num_samples": 17}, "num_samples"),
        ({"num_samples": 2, "trace": True}, "num_samples"),
        ({"priority": 9}, "priority"),
        ({"client_id": "x" * 129}, "client_id"),
    ]
    for fields, field in bad:
        with pytest.raises(InvalidRequestError, match=field) as refused:
            api.read_generate(pb.GenerateRequest(**fields), V)
        assert refused.value.field == field


def test_a_share_is_that_of_the_client_or_the_tenant_or_the_connection() -> None:
    requests = [
        pb.GenerateRequest(client_id="x", cache_salt="s"),
        pb.GenerateRequest(cache_salt="x"),
        pb.GenerateRequest(),
    ]
    keys = [api.client_key(api.read_generate(each, V), "x") for each in requests]
    assert keys == ["client x", "salt x", "peer x"]


def test_the_three_kinds_of_prompt() -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    ids = pb.TokenIds(ids=[1, 99])
    assert api.read_prompt(pb.GenerateRequest(text="t"), V) == "t"
    assert api.read_prompt(pb.GenerateRequest(token_ids=ids), V) == (1, 99)
    assert api.read_prompt(pb.TokenizeRequest(chat=chat), V) == (ChatTurn("user", "hi"),)
    with pytest.raises(InvalidRequestError, match="must be below 100, got 100"):
        api.read_prompt(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[100])), V)


def _request() -> Request:
    request = Request(RequestId("r"), (1, 2, 3), SamplingParams(seed=8), 10, model="m", arrival=5.0)
    request.output_token_ids += [4, 5]
    request.num_preemptions = 6
    return request


def test_events() -> None:
    accepted = api.accepted(_request(), "X1").accepted
    assert (accepted.request_id, accepted.model, accepted.num_prompt_tokens) == ("r", "m", 3)
    assert (accepted.seed, accepted.max_tokens, accepted.numeric_class) == (8, 10, "X1")
    delta = api.delta(Delta(3, (4, 5), "ab", (b"1" * 16, b"2" * 16))).delta
    assert (delta.start_index, list(delta.token_ids), delta.text) == (3, [4, 5], "ab")
    assert list(delta.logits_digests) == [b"1" * 16, b"2" * 16]


def test_the_end() -> None:
    ending = Ending(FinishReason.STOP, "rest", "", 0, 7.5)
    done = api.finished(_request(), ending, admitted_at=5.5, first_token_at=6.0).finished
    assert (done.reason, done.text) == (sampling_pb2.FINISH_REASON_STOP, "rest")
    assert done.HasField("stop_token_id")
    assert (done.usage.num_prompt_tokens, done.usage.num_generated_tokens) == (3, 2)
    timings = done.timings
    assert (timings.queue_ns, timings.time_to_first_token_ns, timings.total_ns) == (
        500_000_000, 1_000_000_000, 2_500_000_000,
    )  # fmt: skip
    assert done.num_preemptions == 6
    never = api.finished(_request(), ending, admitted_at=None, first_token_at=None).finished
    assert (never.timings.queue_ns, never.timings.time_to_first_token_ns) == (0, 0)


def test_every_reason_that_ends_a_stream_well_has_a_value() -> None:
    for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED):
        ending = Ending(reason, "", "", None, 6.0)
        done = api.finished(_request(), ending, admitted_at=None, first_token_at=None).finished
        assert sampling_pb2.FinishReason.Name(done.reason) == f"FINISH_REASON_{reason.name}"
        assert not done.HasField("stop_token_id")
