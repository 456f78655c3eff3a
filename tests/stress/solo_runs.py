"""Answers of requests that had the machine to themselves, and how other answers must equal them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from scheduler_service.client import AsyncClient, Finished, FinishReason, TokenEvent
from tests.stress.request_pool import PoolRequest


@dataclass(slots=True)
class Answer:
    """What a client has read of one request."""

    token_ids: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)  # hexadecimal
    text: str = ""  # of the tokens' own messages
    last_text: str = ""  # of the message that ends the stream
    reason: str = ""  # empty until the stream has ended well
    stop_string: str | None = None
    stop_token_id: int | None = None

    def add(self, event: TokenEvent | Finished) -> None:
        """Fold an event in."""
        if isinstance(event, TokenEvent):
            self.token_ids += event.token_ids
            self.digests += [digest.hex() for digest in event.logits_digests]
            self.text += event.text
            return
        self.reason = event.reason.value
        self.last_text = event.text
        self.stop_string, self.stop_token_id = event.stop_string, event.stop_token_id

    @property
    def is_whole(self) -> bool:
        """True when it ended by itself."""
        return self.reason in (FinishReason.STOP, FinishReason.LENGTH)


def differences(answer: Answer, solo: Answer) -> list[str]:
    """Return what is not as in the solo run; an answer that was cut short must be its beginning."""
    found = []
    count = len(answer.token_ids)
    if answer.token_ids != solo.token_ids[:count]:
        at = next(
            (i for i, (a, b) in enumerate(zip(answer.token_ids, solo.token_ids, strict=False))
             if a != b), len(solo.token_ids))  # fmt: skip
        found.append(f"token {at} of {count} differs")
    wanted_digests = solo.digests[:count] if solo.digests else []
    if answer.digests != wanted_digests:
        found.append(f"digests differ ({len(answer.digests)} for {count} tokens)")
    if answer.is_whole:
        for name in ("reason", "stop_string", "stop_token_id"):
            got, wanted = getattr(answer, name), getattr(solo, name)
            if got != wanted:
                found.append(f"{name} is {got!r}, alone {wanted!r}")
        if count != len(solo.token_ids):
            found.append(f"{count} tokens, alone {len(solo.token_ids)}")
        if answer.text + answer.last_text != solo.text + solo.last_text:
            found.append("text differs")
    # What was held back for a stop string that never came is in `last_text` of a cancelled
    # request, and rightly not in the solo run's text; hence the tokens' own text alone.
    elif not (solo.text + solo.last_text).startswith(answer.text):
        found.append("text is not the beginning of the solo run's")
    return found


async def run_alone(address: str, requests: Sequence[PoolRequest]) -> list[Answer]:
    """Run the requests one after the other and return their answers."""
    answers = []
    async with AsyncClient(address) as client:
        for request in requests:
            answer = Answer()
            async with await client.generate(request.prompt, request.params) as stream:
                async for event in stream:
                    if isinstance(event, TokenEvent | Finished):
                        answer.add(event)
            if not answer.is_whole:
                raise RuntimeError(f"[stress] a solo run must end, got {answer.reason!r}")
            answers.append(answer)
    return answers


def save(path: Path, answers: Sequence[Answer]) -> None:
    """Write answers for other processes."""
    path.write_text(json.dumps([asdict(answer) for answer in answers]))


def load(path: Path) -> list[Answer]:
    """Read what `save` wrote."""
    return [Answer(**fields) for fields in json.loads(path.read_text())]
