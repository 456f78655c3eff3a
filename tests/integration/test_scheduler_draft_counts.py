"""What replies say of drafts adds up to what the service says, and nothing outlives its request.

However requests end beside drafts: by length, by a string or token inside accepted drafts, by a
cancel while a step verifies them, with another step of them under way or not.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from click.testing import CliRunner, Result

from isobatch.scheduler.v1 import sampling_pb2
from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from scheduler_service.cli import app
from scheduler_service.metrics import DraftPosition
from scheduler_service.speculation import (
    AdaptiveController,
    DraftModelProposer,
    LookupProposer,
    ProposerKind,
    Speculator,
)
from tests.integration.test_scheduler_drafted_parameters import (
    KINDS,
    PROMPTS,
    SAMPLINGS,
    an_executor,
    request,
    serving,
)
from tests.support.fake_drafter import FakeDrafter
from tests.support.fake_executor import FakeExecutor
from tests.support.scheduler_harness import Harness, Output, running
from tests.support.tiny_tokenizer import vocab_size
from tests.support.toy_model import ToyModel


def by_position(harness: Harness, name: str) -> dict[str, list[float]]:
    """Return a counter of drafts: by proposer, the values in order of positions."""
    return {
        kind: [harness.metric(name, proposer=kind, position=each) for each in DraftPosition]
        for kind in ProposerKind
    }


async def check_sums(harness: Harness, finished: list[pb.Finished]) -> None:
    """Replies, statistics and metrics by proposer and position give the same numbers."""
    usages = [each.usage for each in finished]
    drafted = sum(each.num_draft_tokens for each in usages)
    accepted = sum(each.num_accepted_draft_tokens for each in usages)
    stats = await harness.stub.GetStats(pb.GetStatsRequest())
    assert (stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (drafted, accepted)
    shown = by_position(harness, "draft_tokens_total")
    right = by_position(harness, "accepted_draft_tokens_total")
    assert sum(map(sum, shown.values())) == drafted
    assert sum(map(sum, right.values())) == accepted
    for kind in ProposerKind:
        assert all(b <= a for a, b in zip(shown[kind], right[kind], strict=True))
        # A row has no fourth draft without a third. Beyond that a label stands for several.
        assert shown[kind][:4] == sorted(shown[kind][:4], reverse=True)
        assert right[kind][:4] == sorted(right[kind][:4], reverse=True)


async def ends_in_every_way(harness: Harness) -> list[pb.Finished]:
    """Run requests that end by length, by strings and by tokens, side by side."""
    plain = await harness.complete(**request(PROMPTS[1]), disable_speculation=True)
    requests = [request(PROMPTS[1], max_tokens=count) for count in range(1, 9)]
    requests += [
        request(PROMPTS[1], stop=[plain.text[start : start + 3]])
        for start in range(3, len(plain.text) - 3, 2)
    ]
    requests += [request(PROMPTS[1], stop_token_ids=[token]) for token in set(plain.token_ids[3:])]
    requests += [request(each, SAMPLINGS["all"]) for each in PROMPTS]
    found: list[Output] = []
    for start in range(0, len(requests), 4):
        asked = requests[start : start + 4]
        found += await asyncio.gather(*(harness.complete(**each) for each in asked))
    return [plain.finished, *(each.finished for each in found)]


@pytest.mark.parametrize("lookahead", ["auto", "off"])
@pytest.mark.parametrize("kind", [*KINDS, "auto"])
async def test_counts_add_up_however_requests_end(kind: str, lookahead: str) -> None:
    """A string that ends a text is found when the next step of it runs already."""
    async with serving(kind, lookahead=lookahead) as harness:
        finished = await ends_in_every_way(harness)
        await harness.wait_idle()
        assert sum(each.usage.num_accepted_draft_tokens for each in finished) > 0
        await check_sums(harness, finished)


@pytest.mark.parametrize("kind", KINDS)
async def test_drafts_that_are_verified_for_who_is_cancelled_meanwhile_count_for_nobody(
    kind: str,
) -> None:
    executor = an_executor()
    cancelled: list[bool] = []
    async with serving(kind, executor) as harness:

        async def cancel(message: Any) -> None:
            if len(message.wanted_token_indexes) // 4 > 2 and not cancelled:
                cancelled.append(False)
                answer = await harness.stub.Cancel(pb.CancelRequest(request_id="gone"))
                cancelled[0] = answer.was_live

        executor.before_step = cancel
        fields = request(PROMPTS[0], SAMPLINGS["seed"])
        (gone, other) = await asyncio.gather(
            harness.complete(**fields, request_id="gone"),
            harness.complete(**request(PROMPTS[1], SAMPLINGS["seed"])),
        )
        assert cancelled == [True]
        assert gone.finished.reason == sampling_pb2.FINISH_REASON_CANCELLED
        await harness.wait_idle()
        await check_sums(harness, [gone.finished, other.finished])


@pytest.mark.parametrize("kind", KINDS)
async def test_samples_count_each_for_itself(kind: str) -> None:
    finished: list[pb.Finished] = []
    async with serving(kind) as harness:
        fields = request(PROMPTS[0], {"temperature": 1.2, "seed": 30})
        async for event in harness.generate(**fields, num_samples=4):
            if event.WhichOneof("event") == "finished":
                finished.append(event.finished)
        assert len(finished) == 4
        await harness.wait_idle()
        await check_sums(harness, finished)


async def test_nothing_is_kept_however_requests_end() -> None:
    """Steps sent ahead compute rows of those that have ended, and prompts end with a token alone.

    Nothing of either may outlive its request.
    """
    executor = an_executor()
    assert executor.drafter is not None
    async with running(executor, speculation="auto") as harness:
        served = harness.server.engine.served
        assert served is not None
        lookup, controller = LookupProposer(), AdaptiveController()
        model = DraftModelProposer(64, 512, 512)
        served.loop.speculator = Speculator(lookup, controller, 4, model)
        await ends_in_every_way(harness)
        # Beside one that decodes, prompts of one token whose first token is their last.
        short = [request((5 + i,), max_tokens=1) for i in range(4)]
        long = asyncio.create_task(harness.complete(**request(PROMPTS[0], max_tokens=60)))
        for fields in short:
            await harness.complete(**fields)
        await long
        await harness.wait_idle()
        assert harness.metric("vain_rows_total") > 0
        assert served.loop.speculator.num_known == 0
        assert len(lookup) == len(controller) == len(model) == 0


async def test_nothing_is_kept_of_who_ends_while_the_draft_model_works_for_it() -> None:
    executor = an_executor()
    async with serving("auto", executor) as harness:
        served = harness.server.engine.served
        assert served is not None
        draft = served.capabilities.draft
        assert draft is not None
        lookup, speculator = LookupProposer(), served.loop.speculator
        assert speculator is not None
        model = DraftModelProposer(draft.max_rows, draft.max_tokens, draft.context_length)
        speculator._proposer, speculator._draft_model = lookup, model

        async def cancel(message: Any) -> None:
            await harness.stub.Cancel(pb.CancelRequest(request_id="gone"))

        executor.before_draft = cancel
        gone = await harness.complete(**request(PROMPTS[0]), request_id="gone")
        assert gone.finished.reason == sampling_pb2.FINISH_REASON_CANCELLED
        await harness.wait_idle()
        assert len(lookup) == len(model) == 0


async def test_the_command_shows_the_counts_of_an_answer_and_of_all() -> None:
    """`generate --stats` for each sample, and `stats`; without speculation there is nothing."""
    drafter = FakeDrafter(ToyModel(vocab_size()), noise=0.3)
    async with serving("draft", FakeExecutor(drafter=drafter)) as harness:

        async def isobatch(*arguments: str) -> Result:
            environment = {"ISOBATCH_ADDRESS": f"unix:{harness.socket}"}
            result = await asyncio.to_thread(
                CliRunner().invoke, app.cli, list(arguments), env=environment
            )
            assert result.exit_code == 0, result.output
            return result

        asked = ("generate", "--raw", "-p", "abc", "--max-tokens", "12", "--stats")
        found = await isobatch(*asked)
        plain = await isobatch(*asked, "--no-speculation")
        assert found.stdout == plain.stdout
        assert "drafted" not in plain.stderr
        shown = re.findall(r"(\d+) of (\d+) drafted tokens accepted", found.stderr)
        samples = await isobatch(*asked, "--n", "3", "--temperature", "0.5", "--seed", "1")
        shown += re.findall(r"(\d+) of (\d+) drafted tokens accepted", samples.stderr)
        assert len(shown) == 4
        accepted, drafted = (sum(map(int, each)) for each in zip(*shown, strict=True))
        assert 0 < accepted < drafted
        total = await isobatch("stats")
        assert re.search(rf"drafted tokens accepted +{accepted} of {drafted}\b", total.stdout)
