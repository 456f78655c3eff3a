"""No sequence loses more than its account allows, whatever is drafted and whatever comes of it."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.core import SequenceId
from scheduler_service.speculation import AdaptiveController, PlainStep, Proposal, StepSeconds
from scheduler_service.speculation.controller import FIRST_STEPS, SURE_STEPS, TOLERANCE
from tests.support.speculated_text import Simulation, curve

curves = st.builds(
    curve,
    st.floats(0.1, 2.0),
    st.sampled_from([0.0, 0.01, 0.1, 0.5]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(2, 12),
)
shares = st.sampled_from([0.0, 0.0, 0.2, 0.5, 0.9, 1.0])


@given(
    st.lists(st.lists(shares, min_size=1, max_size=4), min_size=1, max_size=5),
    st.integers(20, 120),
    curves,
    st.integers(0, 40),
    st.integers(0, 2**32),
)
def test_every_sequence_ends_within_its_tolerance(
    phases: list[list[float]], num_tokens: int, seconds: StepSeconds, strength: int, seed: int
) -> None:
    """Each text goes through its phases in turns of ten tokens."""
    texts = [lambda n, of=each: of[n // 10 % len(of)] for each in phases]
    run = Simulation(
        texts, num_tokens, seconds, AdaptiveController(), strength=strength, seed=seed
    ).run()
    longest_step = seconds(len(texts))
    for end, plain in zip(run.ends, run.plain_ends, strict=True):
        first = (FIRST_STEPS + SURE_STEPS) * longest_step
        assert end <= plain * (1 + TOLERANCE) + first + 1e-9


@given(
    st.dictionaries(
        st.integers(1, 6), st.tuples(st.integers(0, 8), st.integers(0, 70)), max_size=6
    ),
    st.integers(0, 20),
    st.integers(0, 30),
    curves,
    st.integers(0, 2**32),
)
def test_choices_keep_to_proposals_and_room(
    given_proposals: dict[int, tuple[int, int]],
    room: int,
    prompt: int,
    seconds: StepSeconds,
    seed: int,
) -> None:
    rng = random.Random(seed)
    controller = AdaptiveController()
    ids = [SequenceId(each) for each in sorted({1, 7} | given_proposals.keys())]
    proposals = {
        SequenceId(each): Proposal((1,) * count, strength)
        for each, (count, strength) in given_proposals.items()
    }
    step = PlainStep(ids, room, lambda n: seconds(n + prompt), seconds(len(ids)))
    for _ in range(20):
        chosen = controller.choose(step, proposals)
        assert sum(chosen.values()) <= room
        for each, count in chosen.items():
            assert 1 <= count <= len(proposals[each].token_ids)
        for each, proposal in proposals.items():
            controller.learn(each, proposal, (rng.randint(0, 1),) * 3)
        drawn = {each: 1 + rng.randint(0, chosen.get(each, 0)) for each in ids}
        controller.settle(step, sum(chosen.values()), drawn)
