"""Load on isobatch through the asyncio SDK: ADDRESS as argument, a Load in, Figures out (JSON)."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3]))

from scheduler_service.client import AsyncClient, Finished, GenerationParams, TokenEvent, Usage
from tests.bench.peers.figures import Figures, figures
from tests.bench.peers.prompts import Load


async def one_stream(
    client: AsyncClient, prompt: tuple[int, ...], num_tokens: int
) -> tuple[list[tuple[float, int]], Usage]:
    """Runs one request to its end."""
    arrivals: list[tuple[float, int]] = []
    params = GenerationParams(
        max_tokens=num_tokens,
        temperature=0.0,
        ignore_eos=True,
        # Prompts of other rounds begin alike; nobody else has this salt.
        cache_salt=uuid.uuid4().hex,
    )
    async with await client.generate(prompt, params) as stream:
        async for event in stream:
            if isinstance(event, TokenEvent):
                arrivals.append((time.perf_counter(), len(event.token_ids)))
            elif isinstance(event, Finished):
                if event.usage.num_generated_tokens != num_tokens:
                    raise RuntimeError(f"[bench] wanted {num_tokens} tokens, got {event.usage}")
                return arrivals, event.usage
    raise RuntimeError("[bench] a stream ended without Finished")


async def run(address: str, load: Load) -> Figures:
    """Runs all requests at once."""
    async with AsyncClient(address) as client:
        await client.connect()
        started = time.perf_counter()
        ended = await asyncio.gather(
            *(one_stream(client, prompt, load.num_tokens) for prompt in load.prompts)
        )
    return figures(
        started,
        [arrivals for arrivals, _ in ended],
        sum(usage.num_prompt_tokens for _, usage in ended),
        sum(usage.num_cached_tokens for _, usage in ended),
    )


if __name__ == "__main__":
    found = asyncio.run(run(sys.argv[1], Load.from_json(json.load(sys.stdin))))
    print(json.dumps(found.to_json()))
