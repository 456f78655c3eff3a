"""Rows of docs/bug_rows.md about cached prefixes, on the real kernels and a tiny model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from executor_service.engine.engine import Engine
from tests.support.prefix_engine import TEXT, Client, build, write_model
from tests.support.steps import Row
from tests.support.tiny_model import TinyShape

pytest.importorskip("isobatch_kernels._cpu", reason="the native CPU module is not built here")

WINDOW = 24
CHUNK = 16


@pytest.fixture(scope="module", params=["all keys", "a window"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """An engine over a model with full attention, and over one with a window."""
    path = tmp_path_factory.mktemp("model")
    if request.param == "a window":
        write_model(path, TinyShape("qwen2", vocab_size=200, window=WINDOW))
    else:
        write_model(path)
    built = build(path)
    yield built
    built.close()


def other_end(length: int) -> list[int]:
    """A text that shares its first `length` tokens with TEXT, and none behind them."""
    return TEXT[:length] + [(token + 1) % 200 for token in TEXT[length:]]


@pytest.mark.parametrize("shared", [16, WINDOW, 32, 80])
def test_b04_a_conversation_that_shares_a_beginning_gets_its_own_reply(
    engine: Engine, shared: int
) -> None:
    """The shared part is shorter than the window, equal to it and longer; A has wrapped it."""
    text = other_end(shared)
    _, cold = Client(engine).run(text, salt=f"cold {shared}")
    salt = f"warm {shared}"
    client = Client(engine)
    first, _ = client.open(TEXT, salt=salt)
    digest_of_a = client.digest(first, TEXT, 0, chunk=8)
    cached, warm = client.run(text, salt=salt)
    assert cached == shared // 16 * 16
    assert warm == cold
    # A goes on as if nobody had shared its blocks.
    again, digest = client.run(TEXT, salt=salt)
    assert (again, digest) == (96, digest_of_a)


@pytest.mark.parametrize("left", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1])
def test_b13_a_hit_that_leaves_any_part_of_a_chunk(engine: Engine, left: int) -> None:
    text = TEXT[: 48 + left]
    _, cold = Client(engine).run(text, salt=f"cold {left}")
    client = Client(engine)
    client.run(TEXT[:48], salt=f"warm {left}")
    sequence_id, cached = client.open(text, most=48, salt=f"warm {left}")
    assert cached == 48
    assert client.digest(sequence_id, text, cached, CHUNK) == cold


@pytest.mark.parametrize("length", [1, 2, 16, 17])
def test_b31_the_same_short_prompt_twice(engine: Engine, length: int) -> None:
    """At least one token is left to compute, however much is cached."""
    salt = f"short {length}"
    cached, first = Client(engine).run(TEXT[:length], salt=salt)
    assert cached == 0
    cached, second = Client(engine).run(TEXT[:length], salt=salt)
    assert cached == (length - 1) // 16 * 16
    assert second == first


def test_b14_after_a_hit_refused_drafts_are_taken_back(engine: Engine) -> None:
    """Drafts of four behind a hit: all right, all wrong, wrong in the middle."""
    _, cold = Client(engine).run(TEXT, salt="plain")
    client = Client(engine)
    client.run(TEXT[:33], salt="drafts")
    sequence_id, position = client.open(TEXT[:40], salt="drafts")
    assert position == 32
    generator = np.random.default_rng(1)
    while position < len(TEXT) - 5:
        num_right = int(generator.integers(0, 5))
        wrong = [(token + 1) % 200 for token in TEXT[position + 1 + num_right : position + 5]]
        row = (*TEXT[position : position + 1 + num_right], *wrong)
        client.step(Row(sequence_id, row, position), verify=True)
        position += 1 + num_right
    assert client.digest(sequence_id, TEXT, position) == cold
    cached, warm = Client(engine).run(TEXT, salt="drafts")
    assert (cached, warm) == (96, cold)
