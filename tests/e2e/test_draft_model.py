"""A draft model on real kernels: tokens and fp32 logits are those without, and its drafts count."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from isobatch.scheduler.v1 import sampling_pb2
from scheduler_service.speculation import (
    AdaptiveController,
    DraftModelProposer,
    FixedController,
    LookupProposer,
    Speculator,
)
from tests.e2e.test_speculation import PROMPTS, SAMPLING, SHAPE, ask
from tests.support.scheduler_harness import Output, running
from tests.support.services import Service, start_executor
from tests.support.tiny_model import Storage, write_directory

# Half the layers, other weights, and a vocabulary that is padded to another size.
OTHER = replace(SHAPE, num_layers=1, vocab_size=SHAPE.vocab_size + 5, context_length=120)


@pytest.fixture(scope="module", params=["itself", "another"])
def executor(request: pytest.FixtureRequest) -> Iterator[tuple[str, Service]]:
    """An executor whose draft model is the target itself, or a random one, and which it is."""
    folder = Path(tempfile.mkdtemp(prefix="ib-"))
    try:
        write_directory(folder / "model", SHAPE, Storage(4))
        write_directory(folder / "other", OTHER, Storage(4), seed=8)
        draft = folder / ("model" if request.param == "itself" else "other")
        flags = ("--kv-memory-mb", "1", "--threads", "1", "--profile", "off")
        service = start_executor(folder, folder / "model", *flags, "--draft-model", str(draft))
        try:
            yield request.param, service
        finally:
            service.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def counts(outputs: list[Output]) -> list[tuple[int, int]]:
    """Drafted and accepted tokens of each."""
    usages = [output.finished.usage for output in outputs]
    return [(each.num_draft_tokens, each.num_accepted_draft_tokens) for each in usages]


@pytest.mark.parametrize("name", SAMPLING)
async def test_tokens_and_logits_are_those_of_plain_decoding(
    executor: tuple[str, Service], name: str
) -> None:
    """k from 1 to 8, one stream and eight, both proposers; totals are equal alone and batched."""
    which, service = executor
    sampling = sampling_pb2.SamplingParams(**SAMPLING[name])
    async with running(start_executor=False, executor=service.address) as harness:
        await harness.wait_serving()
        served = harness.server.engine.served
        assert served is not None
        draft = served.capabilities.draft
        assert draft is not None
        plain = await ask(harness, PROMPTS, sampling=sampling)
        alone: list[tuple[int, int]] = []
        for count, k, kind in ((8, 3, "draft"), (1, 3, "draft"), (8, 8, "auto"), (8, 1, "draft"),
                               (2, 0, "auto")):  # fmt: skip
            served.loop.speculator = Speculator(
                LookupProposer() if kind == "auto" else None,
                FixedController(k) if k else AdaptiveController(),
                k or 8,
                DraftModelProposer(draft.max_rows, draft.max_tokens, draft.context_length),
                draft.cost_curve,
            )
            found = await ask(harness, PROMPTS[:count], sampling=sampling)
            for wanted, got in zip(plain, found, strict=False):
                assert got.token_ids == wanted.token_ids, (kind, k)
                assert got.digests == wanted.digests, (kind, k)
            drafted, accepted = (sum(each) for each in zip(*counts(found), strict=True))
            if k:
                assert drafted > 0
            if which == "itself" and name == "greedy" and kind == "draft":
                assert accepted == drafted
            if k == 3:
                alone.append(counts(found)[0])
        assert alone[0] == alone[1]
        assert harness.server.engine.is_connected
