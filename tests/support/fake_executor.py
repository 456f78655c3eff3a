"""An executor with a toy model, true to the contract: paged counts, epochs, idempotent steps.

It runs in the test's process over a real socket, checks every message it gets, finds prefixes as
the contract says, and can be told to fail: restart, drop a session before or after a step is
computed, refuse for want of blocks.
"""

import asyncio
import contextlib
import hashlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import numpy as np

from isobatch.executor.v1 import capabilities_pb2, drafts_pb2, provenance_pb2, token_rows_pb2
from isobatch.executor.v1 import executor_service_pb2 as pb
from isobatch.executor.v1 import executor_service_pb2_grpc as pb_grpc
from scheduler_service.sampling import Statistic, row_statistics
from tests.support.fake_answers import abort_stale, array, pack_statistics
from tests.support.fake_drafter import FakeDrafter
from tests.support.fake_prefix_cache import FakePrefixCache
from tests.support.fake_provenance import toy_provenance
from tests.support.fake_steps import KeptAnswer, tokens_of, until_fenced
from tests.support.tiny_tokenizer import CHAT_TEMPLATE, EOS_ID, tokenizer_document, vocab_size
from tests.support.toy_model import ToyModel

_EPOCHS = itertools.count(1000)
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class DropSession(Exception):  # noqa: N818  a signal of the tests, not an error
    """Raised by a hook to break the session's stream."""


@dataclass(slots=True)
class FakeExecutor(pb_grpc.ExecutorServiceServicer):
    """Settings first, then what happened; change either at any time."""

    num_blocks: int = 64
    block_size: int = 16
    context_length: int = 512
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_top_k: int = 128
    max_steps_in_flight: int = 2
    model_id: str = "toy"
    weights_digest: str = "w0"
    tokenizer_json: bytes = field(default_factory=tokenizer_document)
    step_seconds: float = 0.0
    # Rows with this token are not finite.
    poison_token: int | None = None
    prefix_cache: bool = True
    drafter: FakeDrafter | None = None
    # (rows, tokens, context, nanoseconds) of each point of the cost curve.
    cost_points: tuple[tuple[int, int, int, int], ...] = ()
    is_ready: bool = True
    # Called with each step: before it is computed, and after, before it is answered.
    before_step: Callable[[token_rows_pb2.Step], Awaitable[None]] | None = None
    after_step: Callable[[token_rows_pb2.Step], Awaitable[None]] | None = None
    before_draft: Callable[[drafts_pb2.DraftTokens], Awaitable[None]] | None = None
    # Called with each Open before it is answered.
    after_open: Callable[[token_rows_pb2.OpenSequences], Awaitable[None]] | None = None

    model: ToyModel = field(default_factory=lambda: ToyModel(vocab_size()))
    executor_epoch: int = field(default_factory=lambda: next(_EPOCHS))
    scheduler_epoch: int = 0
    # Generation and cached tokens at the opening of each open sequence.
    sequences: dict[int, tuple[int, int]] = field(default_factory=dict)
    # Messages in order of arrival, and steps that were really computed.
    openings: list[token_rows_pb2.OpenSequences] = field(default_factory=list)
    steps: list[token_rows_pb2.Step] = field(default_factory=list)
    computed_step_ids: list[int] = field(default_factory=list)
    num_refusals: int = 0
    num_fetched_rows: int = 0
    peak_blocks: int = 0
    # The last answers, the latest one last.
    _kept: deque[KeptAnswer] = field(default_factory=lambda: deque(maxlen=2))
    _fence: asyncio.Event = field(default_factory=asyncio.Event)
    _live: set[asyncio.Event] = field(default_factory=set)
    _blocks: FakePrefixCache = field(init=False)

    def __post_init__(self) -> None:
        self._blocks = FakePrefixCache(self.block_size, self.num_blocks)

    def restart(self) -> None:
        """Become a new process: another epoch, nothing cached, sessions broken."""
        self.executor_epoch = next(_EPOCHS)
        self.scheduler_epoch = 0
        self._forget()
        self._fence.set()

    def _forget(self) -> None:
        for sequence_id in list(self.sequences):
            self._release(sequence_id)
        self._cache.clear()
        self._kept.clear()

    @property
    def _cache(self) -> FakePrefixCache:
        # Tests change the number after the scheduler was told another one.
        self._blocks.num_blocks = self.num_blocks
        return self._blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that sequences hold."""
        return self._cache.num_used

    def _release(self, sequence_id: int) -> None:
        self.sequences.pop(sequence_id, None)
        self._cache.release(sequence_id)
        if self.drafter is not None:
            self.drafter.release(sequence_id)

    @contextlib.asynccontextmanager
    async def serving(self, address: str) -> AsyncIterator[None]:
        """Serve on `address` inside the context; leaving it is sudden."""
        server = grpc.aio.server()
        pb_grpc.add_ExecutorServiceServicer_to_server(self, server)
        server.add_insecure_port(address)
        await server.start()
        try:
            yield
        finally:
            await server.stop(None)

    async def GetCapabilities(
        self, request: pb.GetCapabilitiesRequest, context: _Context
    ) -> pb.GetCapabilitiesResponse:
        """Describe the toy model."""
        reply = pb.GetCapabilitiesResponse(executor_epoch=self.executor_epoch, ready=self.is_ready)
        if self.is_ready:
            reply.models.add(
                model_id=self.model_id,
                role=capabilities_pb2.MODEL_ROLE_TARGET,
                architecture="toy",
                vocab_size=self.model.vocab_size,
                context_length=self.context_length,
                numeric_class="X1-toy",
                kv_class="f16",
                weights_digest=self.weights_digest,
                block_size=self.block_size,
                num_blocks=self.num_blocks,
                num_parameters=7,
                cost_curve=[
                    capabilities_pb2.CostPoint(
                        num_rows=rows, num_tokens=tokens, context_length=context, duration_ns=ns
                    )
                    for rows, tokens, context, ns in self.cost_points
                ],
            )
            if self.drafter is not None:
                self.drafter.describe(reply)
            reply.build.backend = "fake"
            reply.max_num_seqs = self.max_num_seqs
            reply.max_num_batched_tokens = self.max_num_batched_tokens
            reply.max_top_k = self.max_top_k
            reply.max_steps_in_flight = self.max_steps_in_flight
        return reply

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: _Context
    ) -> pb.GetTokenizerResponse:
        """Give the tiny tokenizer out."""
        return pb.GetTokenizerResponse(
            model_id=self.model_id,
            tokenizer_json=self.tokenizer_json,
            chat_template=CHAT_TEMPLATE,
            eos_token_ids=[EOS_ID],
            special_token_ids=[0, 1, 2],
        )

    async def GetProvenance(
        self, request: provenance_pb2.GetProvenanceRequest, context: _Context
    ) -> provenance_pb2.GetProvenanceResponse:
        """Know the positions of open sequences."""
        sequence_id = request.sequence.sequence_id
        if self.sequences.get(sequence_id, (None, 0))[0] != request.sequence.generation:
            await context.abort(grpc.StatusCode.NOT_FOUND, "[provenance] not open")
        token_ids = self._cache.tokens(sequence_id)
        return toy_provenance(request, token_ids, self.block_size, self.executor_epoch)

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: _Context
    ) -> AsyncIterator[pb.SessionResponse]:
        """Run one session until the client leaves, it is fenced or a hook drops it."""
        first = await anext(request_iterator)
        if first.WhichOneof("message") != "start":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "start must come first")
        epoch = first.start.scheduler_epoch
        if epoch < self.scheduler_epoch:
            await abort_stale(context, self.scheduler_epoch, has_session=bool(self._live))
        self._fence.set()
        fence = self._fence = asyncio.Event()
        self._live.add(fence)
        context.add_done_callback(lambda _: self._live.discard(fence))  # type: ignore[arg-type]
        # The same epoch again goes on where its last session broke off.
        if epoch > self.scheduler_epoch:
            self._forget()
            self.scheduler_epoch = epoch
        yield pb.SessionResponse(
            started=pb.SessionStarted(
                executor_epoch=self.executor_epoch, kv_occupancy=self._occupancy()
            )
        )
        async for request in until_fenced(fence, request_iterator):
            try:
                yield await self._answer(request)
            except DropSession:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "dropped")
            except ValueError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if fence.is_set():
            await context.abort(grpc.StatusCode.ABORTED, "SESSION_FENCED")

    async def _answer(self, request: pb.SessionRequest) -> pb.SessionResponse:
        match request.WhichOneof("message"):
            case "open":
                opened = self._open(request.open)
                if self.after_open is not None:
                    await self.after_open(request.open)
                return pb.SessionResponse(opened=opened)
            case "step":
                return pb.SessionResponse(step_result=await self._step(request.step))
            case "fetch_logits":
                return pb.SessionResponse(logits_fetched=self._fetch(request.fetch_logits))
            case "release":
                for sequence_id in array(request.release.sequence_ids, "<u8"):
                    self._release(sequence_id)
                occupancy = self._occupancy()
                return pb.SessionResponse(
                    released=token_rows_pb2.SequencesReleased(kv_occupancy=occupancy)
                )
            case "draft" if self.drafter is not None:
                if self.before_draft is not None:
                    await self.before_draft(request.draft)
                return pb.SessionResponse(drafted=self.drafter.answer(request.draft))
            case other:
                raise ValueError(f"unexpected message {other}")

    def _open(self, request: token_rows_pb2.OpenSequences) -> token_rows_pb2.SequencesOpened:
        self.openings.append(request)
        reply = token_rows_pb2.SequencesOpened()
        for each in request.sequences:
            sequence_id, generation = each.key.sequence_id, each.key.generation
            if sequence_id not in self.sequences or self.sequences[sequence_id][0] != generation:
                self._release(sequence_id)
                num_cached = self._cache.open(
                    sequence_id, each.cache_salt, array(each.token_ids, "<i4"),
                    each.max_cached_tokens if self.prefix_cache else 0,
                )  # fmt: skip
                self.sequences[sequence_id] = (generation, num_cached)
            reply.sequences.add(key=each.key, num_cached_tokens=self.sequences[sequence_id][1])
        reply.kv_occupancy.CopyFrom(self._occupancy())
        return reply

    async def _step(self, step: token_rows_pb2.Step) -> token_rows_pb2.StepResult:
        self.steps.append(step)
        if self.before_step is not None:
            await self.before_step(step)
        for kept in self._kept:
            if kept.step_id == step.step_id:
                return kept.result
        expected = 1 if not self._kept else self._kept[-1].step_id + 1
        if step.step_id != expected:
            raise ValueError(f"step_id must be {expected}, got {step.step_id}")
        await asyncio.sleep(self.step_seconds)
        result, rows = self._compute(step)
        self._kept.append(KeptAnswer(step.step_id, result, rows, step.wanted_statistics))
        self.computed_step_ids.append(step.step_id)
        if self.after_step is not None:
            await self.after_step(step)
        return result

    def _compute(
        self, step: token_rows_pb2.Step
    ) -> tuple[token_rows_pb2.StepResult, list[np.ndarray[Any, Any]]]:
        for sequence_id in array(step.released_sequence_ids, "<u8"):
            self._release(sequence_id)
        result = token_rows_pb2.StepResult(step_id=step.step_id, executor_epoch=self.executor_epoch)
        sequence_ids = array(step.row_sequence_ids, "<u8")
        if len(set(sequence_ids)) != len(sequence_ids) or len(sequence_ids) > self.max_num_seqs:
            raise ValueError(f"one row a sequence, at most {self.max_num_seqs} rows")
        lengths = array(step.row_num_tokens, "<i4")
        tokens = tokens_of(step, lengths, self._kept)
        if tokens is None:
            result.outcome = token_rows_pb2.STEP_OUTCOME_SOURCE_NOT_COMPUTED
            result.kv_occupancy.CopyFrom(self._occupancy())
            return result, []
        if sum(lengths) != len(tokens) or len(tokens) > self.max_num_batched_tokens:
            raise ValueError("token counts do not fit")
        grown: dict[int, list[int]] = {}
        num_drafts: dict[int, int] = {}
        wanted = array(step.wanted_token_indexes, "<i4")
        contexts: list[tuple[int, int]] = []
        start = 0
        for sequence_id, generation, position, length in zip(
            sequence_ids, array(step.row_generations, "<u4"),
            array(step.row_start_positions, "<i4"), lengths, strict=True,
        ):  # fmt: skip
            if self.sequences.get(sequence_id, (None, 0))[0] != generation:
                raise ValueError(f"sequence {sequence_id}.{generation} is not open")
            least, most = self.sequences[sequence_id][1], len(self._cache.tokens(sequence_id))
            if not least <= position <= most or length < 1:
                raise ValueError(f"row must start in {least}..{most}, got {position}")
            # A refused draft is taken back by the row that comes after it.
            self._cache.take_back(sequence_id, position)
            grown[sequence_id] = tokens[start : start + length]
            contexts += [(sequence_id, position + i + 1) for i in range(length)]
            start += length
            # Tokens after the first wanted one are drafts.
            first = next((each for each in wanted if start - length <= each < start), start - 1)
            num_drafts[sequence_id] = start - 1 - first
        if not self._cache.grow(grown, num_drafts):
            self.num_refusals += 1
            result.outcome = token_rows_pb2.STEP_OUTCOME_NO_CAPACITY
            result.kv_occupancy.CopyFrom(self._occupancy())
            return result, []
        result.outcome = token_rows_pb2.STEP_OUTCOME_COMPUTED
        outcomes = bytearray()
        for sequence_id in grown:
            is_bad = self.poison_token in self._cache.tokens(sequence_id)
            outcomes.append(
                token_rows_pb2.ROW_OUTCOME_NON_FINITE
                if is_bad
                else token_rows_pb2.ROW_OUTCOME_COMPUTED
            )
            if is_bad:
                result.non_finite_details.append("layer 3, attention")
        result.row_outcomes = bytes(outcomes)
        self.peak_blocks = max(self.peak_blocks, self.num_used_blocks)
        rows = self._answer_wanted(step, contexts, result)
        result.kv_occupancy.CopyFrom(self._occupancy())
        result.timings.total_ns = int(self.step_seconds * 1e9)
        return result, rows

    def _answer_wanted(
        self,
        step: token_rows_pb2.Step,
        contexts: list[tuple[int, int]],
        result: token_rows_pb2.StepResult,
    ) -> list[np.ndarray[Any, Any]]:
        wanted = array(step.wanted_token_indexes, "<i4")
        flags = [Statistic(each) for each in array(step.wanted_statistics, "<u4")]
        edit_starts = array(step.edit_starts, "<i4") or [0] * (len(wanted) + 1)
        edit_ids, values = array(step.edit_ids, "<i4"), np.frombuffer(step.edit_values, "<f4")
        rows, answers = [], []
        for index, (token_index, inverse_temperature, u, top_k) in enumerate(
            zip(
                wanted, array(step.wanted_inverse_temperatures, "<f4"),
                array(step.wanted_quantiles, "<f4"), array(step.wanted_top_k, "<i4"), strict=True,
            )
        ):  # fmt: skip
            sequence_id, length = contexts[token_index]
            logits = self.model.logits(self._cache.tokens(sequence_id)[:length])
            for edit in range(edit_starts[index], edit_starts[index + 1]):
                logits[edit_ids[edit]] += values[edit]
            rows.append(logits)
            answers.append(
                row_statistics(logits, inverse_temperature=inverse_temperature, u=u, top_k=top_k)
            )
        pack_statistics(result, flags, answers)
        if any(Statistic.DIGEST in each for each in flags):
            result.digests = b"".join(map(digest, rows))
        return rows

    def _fetch(self, request: token_rows_pb2.FetchLogits) -> token_rows_pb2.LogitsFetched:
        if not self._kept or self._kept[-1].step_id != request.step_id:
            raise ValueError("logits of the last step only")
        indexes = array(request.wanted_indexes, "<i4")
        self.num_fetched_rows += len(indexes)
        data = b"".join(self._kept[-1].rows[index].tobytes() for index in indexes)
        payload = token_rows_pb2.TensorPayload(inline=data)
        return token_rows_pb2.LogitsFetched(step_id=request.step_id, logits=payload)

    def _occupancy(self) -> token_rows_pb2.KvOccupancy:
        counts = self._cache.counts()
        return token_rows_pb2.KvOccupancy(
            total_blocks=counts.total,
            free_blocks=counts.free,
            evictable_blocks=counts.evictable,
            shared_blocks=counts.shared,
        )


def digest(logits: np.ndarray[Any, Any]) -> bytes:
    """Return the contract's digest of a row."""
    return hashlib.blake2b(logits.tobytes(), digest_size=16).digest()
