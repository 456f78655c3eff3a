"""Whole streams through a real server, against runs of the toy model alone."""

import asyncio
import random

import pytest

from isobatch.scheduler.v1 import sampling_pb2
from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from scheduler_service.core import SamplingParams
from scheduler_service.text.tokenizer import Tokenizer
from tests.support.fake_executor import FakeExecutor, digest
from tests.support.scheduler_harness import Output, running
from tests.support.tiny_tokenizer import EOS_ID, tokenizer_source, vocab_size
from tests.support.toy_model import ToyModel

TOKENIZER = Tokenizer(tokenizer_source())
MODEL = ToyModel(vocab_size())


def _request(seed: int) -> tuple[dict[str, object], list[int]]:
    """Return a request's fields and the tokens that it must give."""
    rng = random.Random(seed)
    prompt = [rng.randrange(3, vocab_size()) for _ in range(rng.randrange(1, 60))]
    params = rng.choice(
        [
            SamplingParams(),
            SamplingParams(temperature=1.0, seed=seed),
            SamplingParams(temperature=0.7, top_k=5, seed=seed),
            SamplingParams(temperature=2.0, top_p=0.5, seed=seed),
            SamplingParams(temperature=4.0, top_p=0.999, seed=seed),
            SamplingParams(temperature=1.5, min_p=0.25, top_k=50, seed=seed),
            SamplingParams(temperature=1.0, seed=seed, logit_bias=((5, 12.5), (9, -100.0))),
        ]
    )
    max_tokens = rng.randrange(1, 30)
    # Parameters travel as fp32, and the toy's own run must use what arrives.
    sent = sampling_pb2.SamplingParams(
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p,
        min_p=params.min_p, seed=params.seed, logit_bias=dict(params.logit_bias),
    )  # fmt: skip
    arrived = SamplingParams(
        sent.temperature, sent.top_k, sent.top_p, sent.min_p, sent.seed, params.logit_bias
    )
    expected = MODEL.solo_run(prompt, arrived, max_tokens, [EOS_ID])
    fields: dict[str, object] = {
        "token_ids": pb.TokenIds(ids=prompt),
        "sampling": sent,
        "stopping": sampling_pb2.StoppingParams(max_tokens=max_tokens),
    }
    return fields, expected


def _check(output: Output, expected: list[int]) -> None:
    assert output.token_ids == expected
    assert output.text == TOKENIZER.decode(expected)
    ended = expected[-1] == EOS_ID
    assert output.finished.reason == (
        sampling_pb2.FINISH_REASON_STOP if ended else sampling_pb2.FINISH_REASON_LENGTH
    )
    assert output.finished.HasField("stop_token_id") is ended


@pytest.mark.parametrize("chunk", [1, 7, 512])
async def test_streams_together_equal_solo_runs(chunk: int) -> None:
    """Mixed lengths, parameters and start times, with room and without."""
    executor = FakeExecutor(num_blocks=30, block_size=4, max_num_batched_tokens=24)
    async with running(executor, max_prefill_chunk=chunk) as harness:

        async def one(seed: int) -> None:
            fields, expected = _request(seed)
            await asyncio.sleep(0.004 * (seed % 5))
            _check(await harness.complete(**fields), expected)

        await asyncio.gather(*map(one, range(16)))
        await harness.wait_idle()
        assert executor.peak_blocks <= executor.num_blocks
        assert harness.metric("requests_running") == 0
        assert harness.metric("requests_waiting") == 0


async def test_preempted_requests_go_on_with_the_same_tokens() -> None:
    executor = FakeExecutor(num_blocks=24, block_size=4)
    stopping = sampling_pb2.StoppingParams(max_tokens=60, ignore_eos=True)
    async with running(executor) as harness:

        async def one(first: int) -> int:
            output = await harness.complete(
                token_ids=pb.TokenIds(ids=[first, 4]), stopping=stopping
            )
            assert output.token_ids == MODEL.solo_run([first, 4], SamplingParams(), 60)
            return output.finished.num_preemptions

        preemptions = sum(await asyncio.gather(*map(one, range(10, 18))))
        assert preemptions > 0
        assert harness.metric("preemptions_total", reason="capacity") == preemptions
        assert executor.peak_blocks <= executor.num_blocks


async def test_rows_that_the_top_k_does_not_decide_are_fetched_with_the_same_result() -> None:
    executor = FakeExecutor(max_top_k=4)
    async with running(executor) as harness:
        for seed in range(6):
            sampling = sampling_pb2.SamplingParams(temperature=8.0, top_p=0.9, seed=seed)
            arrived = SamplingParams(temperature=8.0, top_p=sampling.top_p, seed=seed)
            output = await harness.complete(
                token_ids=pb.TokenIds(ids=[3, 4, 5]),
                sampling=sampling,
                stopping=sampling_pb2.StoppingParams(max_tokens=8),
            )
            assert output.token_ids == MODEL.solo_run([3, 4, 5], arrived, 8, [EOS_ID])
    assert executor.num_fetched_rows > 0


async def test_text_and_chat_prompts_are_tokenized_as_tokenize_says() -> None:
    async with running() as harness:
        stopping = sampling_pb2.StoppingParams(max_tokens=5)
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi <|im_end|>")])
        for prompt in ({"text": "hello world"}, {"chat": chat}):
            tokenized = await harness.stub.Tokenize(pb.TokenizeRequest(**prompt))
            output = await harness.complete(stopping=stopping, **prompt)
            ids = list(tokenized.token_ids)
            assert output.accepted.num_prompt_tokens == len(ids)
            assert output.token_ids == MODEL.solo_run(ids, SamplingParams(), 5, [EOS_ID])
        assert tokenized.rendered.startswith("<|im_start|>user\nhi <|im_end|><|im_end|>")
        assert ids.count(EOS_ID) == 1


async def test_a_drawn_seed_is_reported_and_gives_the_same_tokens_again() -> None:
    async with running() as harness:
        prompt = {"text": "seed", "stopping": sampling_pb2.StoppingParams(max_tokens=12)}
        sampling = sampling_pb2.SamplingParams(temperature=1.0)
        first = await harness.complete(sampling=sampling, **prompt)
        sampling.seed = first.accepted.seed
        again = await harness.complete(sampling=sampling, **prompt)
        other = await harness.complete(
            sampling=sampling_pb2.SamplingParams(temperature=1.0), **prompt
        )
        assert again.token_ids == first.token_ids
        assert other.accepted.seed != first.accepted.seed


async def test_a_stop_string_across_tokens_ends_the_text_before_it() -> None:
    async with running() as harness:
        stopping = sampling_pb2.StoppingParams(max_tokens=40, ignore_eos=True)
        whole = await harness.complete(text="stop", stopping=stopping)
        first, second = whole.token_ids[10:12]
        border = len(TOKENIZER.decode(whole.token_ids[:11]))
        stop = whole.text[border - 1 : border + 1]
        at = whole.text.index(stop)
        stopping.stop.extend([stop, "never in the text"])
        output = await harness.complete(text="stop", stopping=stopping)
        assert output.text == whole.text[:at]
        assert output.finished.reason == sampling_pb2.FINISH_REASON_STOP
        assert output.finished.stop_string == stop
        assert output.token_ids == whole.token_ids[: len(output.token_ids)]
        assert stop in TOKENIZER.decode(output.token_ids)
        assert stop not in TOKENIZER.decode(output.token_ids[:-1])
        assert {first, second} <= set(whole.token_ids)
        await harness.wait_idle()


async def test_a_stop_string_in_the_last_allowed_token_is_a_stop() -> None:
    async with running() as harness:
        stopping = sampling_pb2.StoppingParams(max_tokens=1, ignore_eos=True)
        whole = await harness.complete(token_ids=pb.TokenIds(ids=[30, 31]), stopping=stopping)
        stopping.stop.append(whole.text)
        output = await harness.complete(token_ids=pb.TokenIds(ids=[30, 31]), stopping=stopping)
        assert whole.finished.reason == sampling_pb2.FINISH_REASON_LENGTH
        assert (output.text, output.finished.reason) == ("", sampling_pb2.FINISH_REASON_STOP)


async def test_stop_tokens_and_ignored_end_of_text() -> None:
    async with running() as harness:
        free = sampling_pb2.StoppingParams(max_tokens=30, ignore_eos=True)
        whole = await harness.complete(text="tokens", stopping=free)
        stop_id = whole.token_ids[7]
        free.stop_token_ids.append(stop_id)
        output = await harness.complete(text="tokens", stopping=free)
        cut = whole.token_ids.index(stop_id) + 1
        assert output.token_ids == whole.token_ids[:cut]
        assert output.finished.stop_token_id == stop_id
        biased = sampling_pb2.SamplingParams(logit_bias={EOS_ID: 100.0})
        ended = await harness.complete(text="end", sampling=biased)
        assert (ended.token_ids, ended.text) == ([EOS_ID], "")
        kept = await harness.complete(text="end", sampling=biased, include_special_tokens=True)
        assert kept.text == "<|im_end|>"
        limit = sampling_pb2.StoppingParams(max_tokens=4, ignore_eos=True)
        ignored = await harness.complete(text="end", sampling=biased, stopping=limit)
        assert ignored.token_ids == [EOS_ID] * 4


async def test_the_context_bounds_the_output() -> None:
    async with running(FakeExecutor(context_length=20)) as harness:
        output = await harness.complete(
            token_ids=pb.TokenIds(ids=[3] * 15),
            stopping=sampling_pb2.StoppingParams(ignore_eos=True),
        )
        assert output.accepted.max_tokens == len(output.token_ids) == 5
        assert output.finished.reason == sampling_pb2.FINISH_REASON_LENGTH


async def test_logits_digests_come_with_their_tokens() -> None:
    async with running() as harness:
        fields = {
            "token_ids": pb.TokenIds(ids=[7, 8]),
            "stopping": sampling_pb2.StoppingParams(max_tokens=6, ignore_eos=True),
        }
        plain, output = await asyncio.gather(
            harness.complete(**fields), harness.complete(return_logits_digests=True, **fields)
        )
        known = [7, 8]
        for token_id, found in zip(output.token_ids, output.digests, strict=True):
            assert found == digest(MODEL.logits(known))
            known.append(token_id)
        assert plain.digests == []


async def test_numbers_of_a_finished_request() -> None:
    async with running() as harness:
        output = await harness.complete(
            token_ids=pb.TokenIds(ids=[5] * 40),
            request_id="mine",
            stopping=sampling_pb2.StoppingParams(max_tokens=9, ignore_eos=True),
        )
        assert output.accepted.request_id == "mine"
        assert output.accepted.numeric_class == "X1-toy"
        assert output.finished.usage.num_prompt_tokens == 40
        timings = output.finished.timings
        assert 0 <= timings.queue_ns <= timings.time_to_first_token_ns <= timings.total_ns
        stats = await harness.stub.GetStats(pb.GetStatsRequest())
        assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (40, 9)
        assert stats.executor_connected
        assert harness.metric("requests_total", outcome="length") == 1
        assert harness.metric("generated_tokens_total") == 9
        assert harness.metric("prompt_tokens_total", source="computed") == 40
        assert harness.metric("time_to_first_token_seconds_count") == 1
        assert harness.metric("inter_token_latency_seconds_count") == 8


async def test_models_are_listed() -> None:
    async with running() as harness:
        reply = await harness.stub.ListModels(pb.ListModelsRequest())
        (model,) = reply.models
        assert (model.model, model.vocab_size, model.has_chat_template) == (
            "toy", vocab_size(), True,
        )  # fmt: skip
