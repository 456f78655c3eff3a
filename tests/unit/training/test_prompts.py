"""What the teacher is asked: repeatable, and never what the benchmark asks."""

from __future__ import annotations

import pytest

from tests.bench import speculation_texts
from training.prompts import KINDS, SYSTEM, Prompts


def encode(texts: list[str]) -> list[list[int]]:
    return [[ord(letter) for letter in text] for text in texts]


def prompts(seed: int = 1) -> Prompts:
    return Prompts(encode, seed, max_files=12)


def texts_of(source: Prompts, kind: str, count: int = 40, *, held_out: bool = False) -> list[str]:
    return ["".join(map(chr, row.tokens)) for row in source.rows(kind, count, held_out=held_out)]


def test_a_seed_draws_the_same_rows() -> None:
    assert [prompts().rows(kind, 5) for kind in KINDS] == [
        prompts().rows(kind, 5) for kind in KINDS
    ]
    assert prompts().rows("task", 5) != prompts(2).rows("task", 5)


def test_no_words_of_the_benchmark_are_asked() -> None:
    source = prompts()
    asked = "\n".join(text for kind in KINDS for text in texts_of(source, kind, 200))
    for kind in speculation_texts.KINDS:
        for user in range(8):
            words = speculation_texts.prompt(kind, user)
            order = words.rpartition("```\n\n")[2] if kind == "code edit" else words
            assert order.strip() not in asked
            assert words.splitlines()[-1][:60] not in asked or kind == "code edit"


def test_conversations_begin_in_the_users_turn() -> None:
    for row in prompts().rows("conversation", 20):
        assert row.starts_in_user_turn
        assert "".join(map(chr, row.tokens)).endswith("<|im_start|>user\n")
    assert not any(row.starts_in_user_turn for row in prompts().rows("task", 20))


def test_most_conversations_have_the_templates_own_first_turn() -> None:
    texts = texts_of(prompts(), "task", 100)
    start = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
    with_system = sum(text.startswith(start) for text in texts)
    assert 75 <= with_system < 100
    assert all(text.endswith("<|im_end|>\n<|im_start|>assistant\n") for text in texts)


def test_half_of_the_answers_are_greedy() -> None:
    heats = [row.temperature for row in prompts().rows("task", 200)]
    assert 70 <= heats.count(0.0) <= 130
    assert all(heat == 0 or 0.6 <= heat <= 1.0 for heat in heats)


def test_held_out_code_is_never_learnt_from() -> None:
    source = prompts()
    code = {text.partition("```python\n")[2].partition("\n```")[0] for text in
            texts_of(source, "code edit", 300)}  # fmt: skip
    held_out = {text.partition("```python\n")[2].partition("\n```")[0] for text in
                texts_of(source, "code edit", 50, held_out=True)}  # fmt: skip
    assert held_out
    assert not code & held_out


def test_the_teachers_own_texts_are_summarised() -> None:
    source = prompts()
    source.add_written(["A passage that the teacher wrote."])
    texts = texts_of(source, "summary", 60)
    share = sum("A passage that the teacher wrote." in text for text in texts)
    assert 20 <= share < 60


def test_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="got 'song'"):
        prompts().rows("song", 1)
