"""Tokens and fp32 logits with and without speculation, on real kernels: they are equal.

`long_speculation.py` is the long form.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isobatch.scheduler.v1 import sampling_pb2
from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from scheduler_service.speculation import FixedController, Speculator
from tests.e2e.long_speculation import compare
from tests.support.embedded_model import embedded_model_path
from tests.support.proposers import OracleProposer
from tests.support.scheduler_harness import Harness, Output, collect, running
from tests.support.services import running_pair, start_executor
from tests.support.tiny_model import Storage, TinyShape, write_directory
from tests.support.tiny_tokenizer import vocab_size

SHAPE = TinyShape(vocab_size=vocab_size() + 13, context_length=160)
NUM_TOKENS = 40
PROMPTS = [tuple(range(5 + i, 12 + 5 * i)) for i in range(8)]
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 3},
    "truncated": {"temperature": 1.1, "top_k": 40, "top_p": 0.9, "seed": 4},
}


@pytest.fixture(scope="module")
def executor() -> Iterator[str]:
    """The address of an executor with the tiny model."""
    folder = Path(tempfile.mkdtemp(prefix="ib-"))
    try:
        write_directory(folder / "model", SHAPE, Storage(4))
        flags = ("--kv-memory-mb", "1", "--threads", "1", "--profile", "off")
        service = start_executor(folder, folder / "model", *flags)
        try:
            yield service.address
        finally:
            service.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def ask(harness: Harness, prompts: list[tuple[int, ...]], **fields: Any) -> list[Output]:
    """Ask for all prompts at once."""
    stopping = sampling_pb2.StoppingParams(max_tokens=NUM_TOKENS, ignore_eos=True)

    async def one(prompt: tuple[int, ...]) -> Output:
        call = harness.generate(
            token_ids=pb.TokenIds(ids=prompt), stopping=stopping, return_logits_digests=True,
            **fields,
        )  # fmt: skip
        return await collect(call)

    async with asyncio.timeout(200):
        return await asyncio.gather(*map(one, prompts))


@pytest.mark.parametrize("name", SAMPLING)
async def test_any_draft_gives_the_tokens_and_logits_of_none(executor: str, name: str) -> None:
    """Drafts from right to wrong, k from 1 to 8, one stream and eight, on a tiny model."""
    sampling = sampling_pb2.SamplingParams(**SAMPLING[name])
    async with running(start_executor=False, executor=executor) as harness:
        await harness.wait_serving()
        served = harness.server.engine.served
        assert served is not None
        plain = await ask(harness, PROMPTS, sampling=sampling)
        outputs = {p: each.token_ids for p, each in zip(PROMPTS, plain, strict=True)}
        for count, noise, k in ((8, 0.0, 8), (1, 0.3, 8), (8, 0.3, 3), (8, 0.5, 1), (8, 1.0, 5)):
            proposer = OracleProposer(outputs, vocab_size(), noise=noise, seed=k)
            served.loop.speculator = Speculator(proposer, FixedController(k), k)
            found = await ask(harness, PROMPTS[:count], sampling=sampling)
            for wanted, got in zip(plain, found, strict=False):
                assert got.token_ids == wanted.token_ids, (noise, k)
                assert got.digests == wanted.digests, (noise, k)
            drafted = sum(each.finished.usage.num_draft_tokens for each in found)
            accepted = sum(each.finished.usage.num_accepted_draft_tokens for each in found)
            assert (accepted == drafted) is (noise == 0)
            assert (accepted == 0) is (noise == 1)


@pytest.mark.timeout(300)
def test_a_lookup_on_the_real_model_changes_nothing() -> None:
    """Edits, summaries and stories side by side, greedy and drawn.

    The number of drafts is fixed: the controller may find none worth a try among these neighbours.
    """
    flags = ("--speculation", "lookup", "--fixed-draft-tokens", "3")
    with running_pair(embedded_model_path(), scheduler_flags=flags) as pair:
        found = asyncio.run(compare(pair.schedulers[0].address, 48))
    assert all(each.is_equal for each in found)
    assert sum(each.num_accepted for each in found) > 0
