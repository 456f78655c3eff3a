"""Conversions lose nothing, and refuse what the contract cannot carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.scheduler.v1 import sampling_pb2, scheduler_service_pb2
from scheduler_service.client import (
    ChatMessage,
    FinishReason,
    GenerationParams,
    InvalidRequestError,
    Priority,
    Prompt,
    ProtocolError,
    TokenEvent,
    _convert,
)
from tests.support import fake_scheduler

NAMES = {"model": "toy", "request_id": "r-1"}


def test_every_parameter_reaches_its_own_field() -> None:
    """No two parameters are swapped, and none is dropped."""
    params = GenerationParams(
        max_tokens=7,
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        seed=2**64 - 1,
        logit_bias={5: -1.5},
        stop=("a", "b"),
        stop_token_ids=(8, 9),
        ignore_eos=True,
        include_special_tokens=True,
        cache_salt="salt",
        coalesce_ms=11,
        return_logits_digests=True,
        n=3,
        priority=Priority.INTERACTIVE,
        client_id="me",
    )
    expected = scheduler_service_pb2.GenerateRequest(
        request_id="r-1",
        model="toy",
        text="hello",
        sampling=sampling_pb2.SamplingParams(
            temperature=0.5,
            top_k=3,
            top_p=0.25,
            min_p=0.125,
            seed=2**64 - 1,
            logit_bias={5: -1.5},
        ),
        stopping=sampling_pb2.StoppingParams(
            max_tokens=7, stop=["a", "b"], stop_token_ids=[8, 9], ignore_eos=True
        ),
        include_special_tokens=True,
        cache_salt="salt",
        coalesce_ms=11,
        return_logits_digests=True,
        num_samples=3,
        priority=scheduler_service_pb2.PRIORITY_INTERACTIVE,
        client_id="me",
    )
    assert _convert.generate_request("hello", params, **NAMES) == expected


def test_unset_parameters_stay_unset() -> None:
    """Zero is not a default: the server must see that nothing was said."""
    request = _convert.generate_request("x", GenerationParams(), **NAMES)
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        assert not request.sampling.HasField(name), name
    assert not request.stopping.HasField("max_tokens")


def test_zero_parameters_are_said() -> None:
    """temperature=0 asks for greedy; it is not the same as silence."""
    params = GenerationParams(temperature=0.0, top_k=0, seed=0)
    request = _convert.generate_request("x", params, **NAMES)
    for name in ("temperature", "top_k", "seed"):
        assert request.sampling.HasField(name), name


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_token_ids_go_as_they_are(ids: list[int]) -> None:
    """A prompt of ids arrives unchanged, also when it is empty."""
    request = _convert.generate_request(ids, GenerationParams(), **NAMES)
    assert request.WhichOneof("prompt") == "token_ids"
    assert list(request.token_ids.ids) == ids


def test_conversation_becomes_a_chat() -> None:
    """Roles and contents keep their order."""
    turns = (ChatMessage("system", "be brief"), ChatMessage("user", "hi"))
    request = _convert.generate_request(turns, GenerationParams(), **NAMES)
    assert [(item.role, item.content) for item in request.chat.messages] == [
        ("system", "be brief"),
        ("user", "hi"),
    ]
    assert _convert.tokenize_request(turns, model="toy").chat == request.chat


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (GenerationParams(top_k=-1), "sampling.top_k"),
        (GenerationParams(seed=2**64), "sampling.seed"),
        (GenerationParams(max_tokens=2**31), "stopping.max_tokens"),
        (GenerationParams(temperature="hot"), "sampling.temperature"),  # type: ignore[arg-type]
        (GenerationParams(stop="end"), "stopping.stop"),  # type: ignore[arg-type]
        (GenerationParams(stop_token_ids=(-1,)), "stopping.stop_token_ids"),
        (GenerationParams(logit_bias={-1: 0.0}), "sampling.logit_bias"),
        (GenerationParams(cache_salt="\udc80"), "cache_salt"),
        (GenerationParams(n=0), "n"),
        (GenerationParams(priority="soon"), "priority"),  # type: ignore[arg-type]
    ],
)
def test_what_the_contract_cannot_carry_names_its_field(
    params: GenerationParams, field: str
) -> None:
    """The caller reads which parameter is wrong, not a protobuf traceback."""
    with pytest.raises(InvalidRequestError, match="got ") as caught:
        _convert.generate_request("x", params, **NAMES)
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.parametrize("prompt", [b"text", bytearray(b"text")])
def test_bytes_are_no_token_ids(prompt: Any) -> None:
    """Python takes them for numbers, and whoever passes them means text."""
    with pytest.raises(InvalidRequestError, match="must be text, messages or token ids, got byte"):
        _convert.generate_request(prompt, GenerationParams(), model="", request_id="")


@pytest.mark.parametrize("prompt", ["a\ud800", [ChatMessage("user", "a\ud800")]])
def test_half_a_character_is_named_in_words(prompt: Any) -> None:
    """What Python makes of bytes in an argument that are no UTF-8, say."""
    with pytest.raises(InvalidRequestError, match="must be text that UTF-8 can hold, got 'a"):
        _convert.generate_request(prompt, GenerationParams(), **NAMES)


def test_mixed_prompt_is_refused() -> None:
    """Ids and turns in one prompt have no meaning."""
    prompt = (ChatMessage("user", "hi"), 5)
    with pytest.raises(InvalidRequestError, match=r"chat.messages\[1\] must be a ChatMessage"):
        _convert.generate_request(prompt, GenerationParams(), **NAMES)  # type: ignore[arg-type]


def test_long_values_are_cut_in_messages() -> None:
    """An error message stays readable when the value is a book."""
    with pytest.raises(InvalidRequestError) as caught:
        _convert.generate_request("\udc80" * 10_000, GenerationParams(), **NAMES)
    assert len(caught.value.message) < 400


def test_a_request_that_is_too_large_is_not_sent() -> None:
    """The size is that of the whole message, whatever kind of prompt it holds."""

    def generate(prompt: Prompt) -> object:
        return _convert.generate_request(prompt, GenerationParams(), **NAMES)

    def tokenize(prompt: Prompt) -> object:
        return _convert.tokenize_request(prompt, model="toy")

    empty = _convert.generate_request("x", GenerationParams(), **NAMES).ByteSize() - 1
    # The length of the text itself takes three bytes more than that of one letter.
    fits = 4_194_304 - empty - 3
    _convert.generate_request("x" * fits, GenerationParams(), **NAMES)
    for op, convert, prompt in (
        ("generate", generate, "x" * (fits + 1)),
        ("generate", generate, [5] * 4_200_000),
        ("generate", generate, [ChatMessage("user", "é" * 2_100_000)]),
        ("tokenize", tokenize, "x" * 4_200_000),
    ):
        rule = rf"^\[{op}\] a request must have at most 4194304 bytes, got 4\d{{6}}$"
        with pytest.raises(InvalidRequestError, match=rule) as caught:
            convert(prompt)
        assert caught.value.reason == "MESSAGE_TOO_LARGE"


@pytest.mark.parametrize("prompt", [None, 5, 1.5, True, object(), b"x"])
def test_what_is_no_prompt_is_refused_by_its_type(prompt: Any) -> None:
    rule = f"prompt must be text, messages or token ids, got {type(prompt).__name__}$"
    with pytest.raises(InvalidRequestError, match=rf"^\[generate\] {rule}"):
        _convert.generate_request(prompt, GenerationParams(), **NAMES)
    with pytest.raises(InvalidRequestError, match=rf"^\[tokenize\] {rule}"):
        _convert.tokenize_request(prompt, model="toy")


@pytest.mark.parametrize("bias", [None, "x", 5, [1, 2]])
def test_a_bias_is_a_mapping(bias: Any) -> None:
    with pytest.raises(InvalidRequestError, match="logit_bias must be a mapping, got"):
        _convert.generate_request("x", GenerationParams(logit_bias=bias), **NAMES)


def test_a_number_without_end_is_no_truth_value() -> None:
    params = GenerationParams(ignore_eos=10**30)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"stopping\.ignore_eos must fit the contract"):
        _convert.generate_request("x", params, **NAMES)


@pytest.mark.parametrize("request_id", [5, [], {}, "\udc80"])
def test_what_is_no_id_cancels_nothing(request_id: Any) -> None:
    with pytest.raises(InvalidRequestError, match="request_id must"):
        _convert.cancel_request(request_id)


def test_token_delta_becomes_an_event() -> None:
    """Ids, text, position and digests are kept."""
    response = fake_scheduler.delta(4, count=2)
    response.delta.logits_digests.extend([b"0" * 16, b"1" * 16])
    assert _convert.event(response) == TokenEvent(4, (104, 105), "w4 w5 ", (b"0" * 16, b"1" * 16))


def test_unknown_event_is_passed_over() -> None:
    """The contract grows by addition, so a newer server may say more."""
    assert _convert.event(scheduler_service_pb2.GenerateResponse()) is None


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (sampling_pb2.FINISH_REASON_STOP, FinishReason.STOP),
        (sampling_pb2.FINISH_REASON_LENGTH, FinishReason.LENGTH),
        (sampling_pb2.FINISH_REASON_CANCELLED, FinishReason.CANCELLED),
    ],
)
def test_finish_reasons(reason: sampling_pb2.FinishReason, expected: FinishReason) -> None:
    """Each reason has its own name."""
    event = _convert.event(fake_scheduler.finished(1, reason))
    assert event is not None
    assert getattr(event, "reason", None) is expected


def test_missing_finish_reason_breaks_the_contract() -> None:
    """Zero is not a reason."""
    response = fake_scheduler.finished(1, sampling_pb2.FINISH_REASON_UNSPECIFIED)
    with pytest.raises(ProtocolError, match="finish reason"):
        _convert.event(response)


def test_stop_token_zero_is_not_absence() -> None:
    """Token 0 may be the one that ended the answer."""
    by_token = _convert.event(fake_scheduler.finished(1, stop_token_id=0))
    by_length = _convert.event(fake_scheduler.finished(1))
    assert (getattr(by_token, "stop_token_id", -1), getattr(by_length, "stop_token_id", -1)) == (
        0,
        None,
    )


@pytest.mark.parametrize("convert", [_convert.generate_request, _convert.tokenize_request])
def test_text_prompt_may_be_empty(convert: Callable[..., object]) -> None:
    """An empty text is still a text prompt: the server says what it thinks of it."""
    if convert is _convert.generate_request:
        request = _convert.generate_request("", GenerationParams(), **NAMES)
        assert request.WhichOneof("prompt") == "text"
    else:
        assert _convert.tokenize_request("", model="").WhichOneof("prompt") == "text"
