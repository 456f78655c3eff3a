"""Load on llama-server over HTTP: PORT as argument, a Load in, Figures out (JSON).

A client as light as can be, so that it takes little of the machine from the server: one socket a
stream, server-sent events told apart by their first bytes, JSON parsed for the last one only.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parents[3]))

from tests.bench.peers.figures import Figures, figures
from tests.bench.peers.prompts import Load

_EVENT: Final = b"data: "
_NOTHING: Final = b'"content":""'  # an event that says that the request begins
_LAST: Final = b'"stop":true'
_LINE_BYTES: Final = 1 << 22  # the last event repeats the prompt


def request(prompt: tuple[int, ...], num_tokens: int) -> bytes:
    """One POST of /completion: greedy, past any end, without the cache of earlier prompts."""
    body = json.dumps(
        {
            "prompt": prompt,
            "n_predict": num_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "cache_prompt": False,
            "stream": True,
        }
    ).encode()
    head = (
        "POST /completion HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def one_stream(
    port: int, prompt: tuple[int, ...], num_tokens: int
) -> tuple[list[tuple[float, int]], dict[str, Any]]:
    """Runs one request to its end; returns arrivals and the server's last event."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_LINE_BYTES)
    writer.write(request(prompt, num_tokens))
    times: list[float] = []
    try:
        while line := await reader.readline():
            if not line.startswith(_EVENT) or (_NOTHING in line and _LAST not in line):
                continue
            times.append(time.perf_counter())
            if _LAST in line:
                last: dict[str, Any] = json.loads(line[len(_EVENT) :])
                return arrivals_of(times, last["tokens_predicted"], num_tokens), last
    finally:
        writer.close()
    raise RuntimeError("[bench] llama-server ended a stream early")


def arrivals_of(times: list[float], generated: int, wanted: int) -> list[tuple[float, int]]:
    """Gives every event one token and what was held back (parts of characters) to the last."""
    if generated != wanted:
        raise RuntimeError(f"[bench] wanted {wanted} tokens, got {generated}")
    times = times[:generated]  # the last event brings no token of its own
    return [*((at, 1) for at in times[:-1]), (times[-1], generated - len(times) + 1)]


async def run(port: int, load: Load) -> Figures:
    """Runs all requests at once."""
    started = time.perf_counter()
    ended = await asyncio.gather(
        *(one_stream(port, prompt, load.num_tokens) for prompt in load.prompts)
    )
    return figures(
        started,
        [arrivals for arrivals, _ in ended],
        sum(int(last["tokens_evaluated"]) for _, last in ended),
        sum(int(last["timings"]["cache_n"]) for _, last in ended),
    )


if __name__ == "__main__":
    found = asyncio.run(run(int(sys.argv[1]), Load.from_json(json.load(sys.stdin))))
    print(json.dumps(found.to_json()))
