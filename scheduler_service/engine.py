"""The model that is served, and the executor behind it: connects, recovers, gives up.

While the executor is away, live requests wait. When it comes back the same, the last step is
repeated; when it is a new process, requests are recomputed, and because of the numeric class
they go on with the tokens they would have had. Past the recovery deadline they end with
UNAVAILABLE.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from scheduler_service import logs
from scheduler_service.config import LOOKAHEAD_AUTO, SchedulerConfig
from scheduler_service.core import Limits, RequestId
from scheduler_service.errors import (
    ExecutorChangedError,
    ExecutorFailedError,
    InternalError,
    NotServingError,
    ServiceError,
    UnknownModelError,
)
from scheduler_service.executor_client import (
    ExecutorClient,
    ExecutorDescription,
    ExecutorLoadingError,
    ExecutorSession,
    ExecutorUnavailableError,
    SessionLostError,
    SessionRefusedError,
)
from scheduler_service.fan_out import Totals
from scheduler_service.metrics import ReconnectReason, SchedulerMetrics
from scheduler_service.slow_readers import SlowReaders
from scheduler_service.spans import Spans
from scheduler_service.speculation import ProposerKind, Speculator
from scheduler_service.speculation_setup import make_speculator
from scheduler_service.step_loop import Clock, StepLoop
from scheduler_service.step_sampler import StepSampler
from scheduler_service.text.errors import TokenizerError
from scheduler_service.text.tokenizer import Tokenizer
from scheduler_service.wire.capabilities import Capabilities, WireError

_LOG = logs.get_logger(__name__)
_FIRST_RETRY_SECONDS = 0.05
_LAST_RETRY_SECONDS = 1.0
_LOADING_RETRY_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The default model: what it can do, its text side and its step loop."""

    capabilities: Capabilities
    tokenizer: Tokenizer
    loop: StepLoop

    def continues_as(self, other: Capabilities) -> bool:
        """True when requests can go on with the same bits on the other executor."""
        mine, its = self.capabilities.model, other.model
        return (mine.model_id, mine.weights_digest, mine.numeric_class, mine.kv_class,
                mine.vocab_size) == (
                its.model_id, its.weights_digest, its.numeric_class, its.kv_class,
                its.vocab_size)  # fmt: skip


class Engine:
    """Keeps a session with the executor and runs the step loop over it."""

    def __init__(
        self,
        config: SchedulerConfig,
        client: ExecutorClient,
        metrics: SchedulerMetrics,
        on_serving: Callable[[bool], None],
        clock: Clock = time.monotonic,
        spans: Spans | None = None,
    ) -> None:
        """Call `on_serving` whenever a session opens (True) or is lost (False)."""
        self.totals = Totals()
        self.is_draining = False
        self._config = config
        self._client = client
        self._metrics = metrics
        self._on_serving = on_serving
        self._clock = clock
        self._spans = spans
        self._model: ServedModel | None = None
        self._session: ExecutorSession | None = None
        # When the last session was lost; None while steps succeed.
        self._lost_at: float | None = None
        # Sessions since then that were lost before they got anywhere.
        self._num_vain = 0
        # Why the last session came to nothing although the executor answered.
        self._refused = ""
        # Why the executor will not come back; empty while it may.
        self._given_up = ""

    @property
    def is_connected(self) -> bool:
        """True while a session is open."""
        return self._session is not None

    @property
    def served(self) -> ServedModel | None:
        """The served model; None before the first session."""
        return self._model

    def model(self, name: str = "") -> ServedModel:
        """Return the model of that name, or the default one for the empty name.

        Raises NotServingError before the first session, past the recovery deadline and while
        draining, ExecutorFailedError once nobody will start the executor again, UnknownModelError
        for another name.
        """
        # First, because a supervisor that gives the executor up ends the service as well.
        if self._given_up:
            raise ExecutorFailedError(self._given_up)
        if self.is_draining:
            raise NotServingError("[scheduler] the service is shutting down", reason="DRAINING")
        if self._model is None:
            why = f": {self._refused}" if self._refused else ""
            raise NotServingError(f"[scheduler] the executor is not ready{why}")
        if self._is_overdue():
            raise self._overdue_error()
        known = self._model.capabilities.model.model_id
        if name not in ("", known):
            raise UnknownModelError(name, known)
        return self._model

    def cancel(self, request_id: RequestId) -> bool:
        """End a request; return whether it was live."""
        return self._model is not None and self._model.loop.requests.cancel_group(request_id)

    def give_up(self, make_error: Callable[[], ServiceError]) -> None:
        """End every live request with an error."""
        if self._model is not None:
            self._model.loop.requests.give_up(make_error)

    def give_executor_up(self, why: str) -> None:
        """End every live request, and refuse new ones: the executor will not be started again."""
        _LOG.error("executor_given_up", error=why)
        self._given_up = why
        self.give_up(lambda: ExecutorFailedError(why))

    async def run(self) -> None:
        """Connect and run steps until cancelled; a bug ends live requests and is raised."""
        try:
            await self._run()
        except Exception:
            self.give_up(lambda: InternalError("[scheduler] the step loop failed; see its log"))
            raise

    async def _run(self) -> None:
        delay = _FIRST_RETRY_SECONDS
        resume: ExecutorSession | None = None
        is_told = False  # whether the log says that nobody answers
        while True:
            try:
                session = await self._client.connect(resume)
            except ExecutorUnavailableError as error:
                _LOG.debug("executor_unavailable", error=str(error))
                if delay == _LAST_RETRY_SECONDS and not is_told:
                    # Not at the first attempt: one that starts has no socket for a moment.
                    is_told = True
                    _LOG.info("waiting_for_executor", error=str(error))
                if isinstance(error.__cause__, WireError):
                    self._note_refused(error.__cause__)
                session = None
                if isinstance(error, ExecutorLoadingError):
                    # It is about to come up, and somebody may be waiting for the first token.
                    delay = min(delay, _LOADING_RETRY_SECONDS)
            if session is not None:
                is_told = False
                has_progressed, resume = await self._use(session, resume)
                if has_progressed:
                    delay = _FIRST_RETRY_SECONDS
                    self._lost_at = None
                elif self._lost_at is not None:
                    self._num_vain += 1
            if self._lost_at is None:
                self._lost_at = self._clock()
                self._num_vain = 0
            self._wait_without_executor()
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LAST_RETRY_SECONDS)

    async def _use(
        self, session: ExecutorSession, broken: ExecutorSession | None
    ) -> tuple[bool, ExecutorSession | None]:
        """Run steps over a session until it ends.

        Return whether it got anywhere, and the session to resume, if that makes sense.
        """
        try:
            model = await self._adopt(session, broken)
            self._session = session
            self._given_up = self._refused = ""
            self._on_serving(True)
            if not model.loop.state.has_work:
                self._lost_at = None
            await model.loop.run(session)
        except SessionLostError as error:
            _LOG.warning("executor_session_lost", error=str(error))
            progressed = self._model is not None and self._model.loop.has_progressed
            # A resumed session that was lost again before its first answer is not tried twice.
            return progressed, session if progressed or broken is None else None
        except (SessionRefusedError, WireError, TokenizerError) as error:
            self._note_refused(error)
            return False, None
        finally:
            if self._session is not None:
                self._session = None
                self._on_serving(False)
            await session.close()
        raise AssertionError("[engine] the step loop must not return")

    def _note_refused(self, error: Exception) -> None:
        """Keep why an executor that answers cannot be used; the log says it once."""
        if str(error) != self._refused:
            _LOG.error("executor_session_refused", error=str(error))
            self._refused = str(error)

    async def _adopt(self, session: ExecutorSession, broken: ExecutorSession | None) -> ServedModel:
        """Make the state fit the session's executor; return the model to serve."""
        description = session.description
        model = self._model
        if model is not None and not model.continues_as(description.capabilities):
            _LOG.warning("executor_changed_model")
            model.loop.requests.give_up(
                lambda: ExecutorChangedError("[executor] it came back with another model")
            )
            model = None
        if model is None:
            is_first = self._model is None
            self._model = model = await self._serve_model(description)
            if not is_first:
                self._count_reconnect(model, ReconnectReason.RESTARTED)
            return model
        model.loop.may_look_ahead = self._may_look_ahead(description.capabilities)
        is_resumed = broken is not None and session.scheduler_epoch == broken.scheduler_epoch
        if not is_resumed:
            model.loop.requests.restart(self._limits(description.capabilities))
            before = model.loop.speculator
            has_asked = before is not None and before.has_draft_model
            if has_asked or description.capabilities.draft is not None:
                # The new executor's draft model knows no sequence, may be another one or be gone.
                model.loop.speculator = self._speculator(description.capabilities)
        reason = ReconnectReason.RESUMED if is_resumed else ReconnectReason.RESTARTED
        self._count_reconnect(model, reason)
        return model

    def _count_reconnect(self, model: ServedModel, reason: ReconnectReason) -> None:
        self.totals.num_executor_reconnects += 1
        name = model.capabilities.model.model_id
        self._metrics.for_model(name).executor_reconnects[reason].inc()
        _LOG.info("executor_reconnected", how=reason.value)

    async def _serve_model(self, description: ExecutorDescription) -> ServedModel:
        capabilities = description.capabilities
        # Large vocabularies take a while to build, and streams of a former model are ending.
        tokenizer = await asyncio.to_thread(Tokenizer, description.tokenizer)
        self._metrics.set_build_info(capabilities.device, capabilities.mlx_version)
        loop = StepLoop(
            capabilities.model,
            self._limits(capabilities),
            StepSampler(capabilities.model.vocab_size, capabilities.max_top_k),
            self._metrics.for_model(capabilities.model.model_id),
            self.totals,
            self._clock,
            None if self._spans is None else self._spans.step,
            SlowReaders(self._config.max_undelivered_tokens, self._config.slow_reader_seconds),
            self._speculator(capabilities),
            may_look_ahead=self._may_look_ahead(capabilities),
        )
        _LOG.info("model_served", model=capabilities.model.model_id, device=capabilities.device)
        return ServedModel(capabilities, tokenizer, loop)

    def _may_look_ahead(self, capabilities: Capabilities) -> bool:
        return self._config.lookahead == LOOKAHEAD_AUTO and capabilities.max_steps_in_flight > 1

    def _speculator(self, capabilities: Capabilities) -> Speculator | None:
        speculator = make_speculator(self._config, capabilities.draft)
        wanted = self._config.speculation
        if wanted == ProposerKind.DRAFT and speculator is None:
            _LOG.warning("no_draft_model", speculation=wanted)
        return speculator

    def _limits(self, capabilities: Capabilities) -> Limits:
        config, model = self._config, capabilities.model
        max_tokens = min(config.max_num_batched_tokens, capabilities.max_num_batched_tokens)
        return Limits(
            max_num_batched_tokens=max_tokens,
            max_num_seqs=min(config.max_num_seqs, capabilities.max_num_seqs),
            max_num_waiting=config.max_num_waiting,
            max_waiting_tokens=config.max_waiting_tokens,
            aging_seconds=config.aging_seconds,
            block_size=model.block_size,
            num_blocks=model.num_blocks,
            context_length=model.context_length,
            max_prefill_chunk=min(config.max_prefill_chunk, max_tokens),
            max_step_seconds=config.max_step_ms / 1e3,
            cost_curve=model.cost_curve,
        )

    def _is_overdue(self) -> bool:
        if self._lost_at is None or self.is_connected:
            return False
        return self._clock() - self._lost_at > self._config.recovery_deadline_seconds

    def _wait_without_executor(self) -> None:
        if self._model is None:
            return
        self._model.loop.requests.expire(self._clock())
        self._model.loop.requests.dispatch()
        if self._is_overdue() and self._model.loop.state.requests:
            _LOG.error("recovery_deadline_passed")
            self._model.loop.requests.give_up(self._overdue_error)

    def _overdue_error(self) -> NotServingError:
        seconds = self._config.recovery_deadline_seconds
        found = f"{self._num_vain} sessions lost before" if self._num_vain else "no session"
        return NotServingError(f"[executor] it must answer again within {seconds:g} s, got {found}")
