"""Every number that the process exposes: names, kinds, units and label values, declared once."""

import functools
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import CollectorRegistry

from scheduler_service.instruments import Counter, Family, Gauge, Histogram
from scheduler_service.speculation import ProposerKind

# What the format allows an exemplar, less the name of its one label.
_MAX_EXEMPLAR_ID = 128 - len("request_id")


class Outcome(StrEnum):
    """How a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    REJECTED = "rejected"
    ERROR = "error"


class PromptSource(StrEnum):
    """Where the keys and values of known tokens came from."""

    COMPUTED = "computed"
    PREFIX_MEMORY = "prefix_memory"
    RECOMPUTED = "recomputed"


class RowPhase(StrEnum):
    """Kind of a token row: one known token, or several."""

    PREFILL = "prefill"
    DECODE = "decode"


class StepPhase(StrEnum):
    """Parts of the wall time of a step; they do not overlap and add up to it.

    The executor works while tokens are fanned out, so `forward` is only that part of its work
    for which the step loop had to wait.
    """

    PLAN = "plan"
    TRANSPORT = "transport"
    FORWARD = "forward"
    SAMPLE = "sample"
    FANOUT = "fanout"


class PreemptionReason(StrEnum):
    """Why a request lost its cached state."""

    CAPACITY = "capacity"
    PRIORITY = "priority"
    PAUSED = "paused"
    EXECUTOR_RESTART = "executor_restart"
    NON_FINITE_DRAFT = "non_finite_draft"


class RefusalReason(StrEnum):
    """Why a request was not taken."""

    INVALID = "invalid"
    QUEUE_REQUESTS = "queue_requests"
    QUEUE_TOKENS = "queue_tokens"
    DEADLINE_UNREACHABLE = "deadline_unreachable"


class WaitingClass(StrEnum):
    """Priority class of a waiting request."""

    INTERACTIVE = "interactive"
    NORMAL = "normal"
    BATCH = "batch"


class ReconnectReason(StrEnum):
    """What a new connection found."""

    RESUMED = "resumed"
    RESTARTED = "restarted"


class DraftPosition(StrEnum):
    """Place of a drafted token in its row, from 1."""

    P1 = "1"
    P2 = "2"
    P3 = "3"
    P4 = "4"
    P5_TO_8 = "5-8"
    P9_AND_MORE = "9+"


_DRAFT_POSITIONS = (
    DraftPosition.P1, DraftPosition.P2, DraftPosition.P3, DraftPosition.P4,
    *(DraftPosition.P5_TO_8,) * 4,
)  # fmt: skip
_QUEUE_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_FIRST_TOKEN_SECONDS = (
    0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60,
)  # fmt: skip
_INTER_TOKEN_SECONDS = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15,
    0.25, 0.5, 1,
)  # fmt: skip
_REQUEST_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_STEP_ROWS = tuple(2**power for power in range(12))
_PHASE_SECONDS = (
    0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """The instruments of one model, with their label values bound."""

    requests_running: Gauge
    requests_waiting: Gauge
    requests_waiting_by_class: dict[WaitingClass, Gauge]
    waiting_tokens: Gauge
    streams_paused: Gauge
    refusals: dict[RefusalReason, Counter]
    requests: dict[Outcome, Counter]
    prompt_tokens: dict[PromptSource, Counter]
    generated_tokens: Counter
    queue_time: Histogram
    time_to_first_token: Histogram
    inter_token_latency: Histogram
    request_duration: Histogram
    # Number of token rows; token counts are in prompt_tokens and generated_tokens.
    step_rows: dict[RowPhase, Histogram]
    step_phase: dict[StepPhase, Histogram]
    # Equals the sum over the phases; counted beside it, so that a gap would show.
    step_wall: Counter
    last_step: Gauge
    # By the cost curve, and the executor's time of the same steps.
    step_predicted: Counter
    step_measured: Counter
    step_bound: Gauge
    preemptions: dict[PreemptionReason, Counter]
    executor_reconnects: dict[ReconnectReason, Counter]
    # Steps sent before the answer to the one ahead of them; rows that nobody had use for.
    steps_ahead: Counter
    vain_rows: Counter
    # Of closed traces of requests.
    trace_bytes: Counter
    # By proposer and position: drafted tokens that were verified, and those accepted.
    draft_tokens: dict[tuple[ProposerKind, DraftPosition], Counter]
    accepted_draft_tokens: dict[tuple[ProposerKind, DraftPosition], Counter]
    has_exemplars: bool

    def count_drafts(self, proposer: ProposerKind, num_drafted: int, num_accepted: int) -> None:
        """Count the drafted tokens of one row."""
        for index in range(num_drafted):
            place = _DRAFT_POSITIONS[index : index + 1] or (DraftPosition.P9_AND_MORE,)
            self.draft_tokens[proposer, place[0]].inc()
            if index < num_accepted:
                self.accepted_draft_tokens[proposer, place[0]].inc()

    def exemplar(self, request_id: str) -> dict[str, str] | None:
        """Return what names a request beside a value of a histogram, where that is asked for.

        Exemplars are no labels: each bucket keeps one, and only OpenMetrics pages show it.
        """
        if not self.has_exemplars or len(request_id) > _MAX_EXEMPLAR_ID:
            return None
        return {"request_id": request_id}


class SchedulerMetrics:
    """All instruments of the process, in one registry."""

    def __init__(
        self, registry: CollectorRegistry, version: str, *, has_exemplars: bool = False
    ) -> None:
        """Declare the instruments in `registry`."""
        self._has_exemplars = has_exemplars

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Family[Gauge]:
            return Family(Gauge, f"isobatch_scheduler_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, labels: tuple[str, ...]) -> Family[Counter]:
            return Family(Counter, f"isobatch_scheduler_{name}", text, labels, registry=registry)

        def histogram(
            name: str, text: str, labels: tuple[str, ...], *, buckets: tuple[float, ...]
        ) -> Family[Histogram]:
            full = f"isobatch_scheduler_{name}"
            return Family(lambda: Histogram(buckets), full, text, labels, registry=registry)

        model = ("model",)
        self._running = gauge("requests_running", "Requests that hold cache.", model)
        self._waiting = gauge("requests_waiting", "Requests that wait.", model)
        self._waiting_class = gauge(
            "requests_waiting_by_class", "Requests that wait, by priority.", ("model", "priority")
        )
        self._waiting_tokens = gauge("waiting_tokens", "Tokens of requests that wait.", model)
        self._paused = gauge("streams_paused", "Requests whose reader is behind.", model)
        self._refusals = counter("refusals", "Requests not taken.", ("model", "reason"))
        self._requests = counter("requests", "Requests that ended.", ("model", "outcome"))
        self._prompt_tokens = counter(
            "prompt_tokens",
            "Known tokens whose keys and values were made, by where they came from.",
            ("model", "source"),
        )
        self._generated = counter("generated_tokens", "Tokens generated.", model)
        self._queue = histogram(
            "queue_time_seconds", "From arrival to the first row.", model, buckets=_QUEUE_SECONDS
        )
        self._first_token = histogram(
            "time_to_first_token_seconds",
            "From arrival to the first token.",
            model,
            buckets=_FIRST_TOKEN_SECONDS,
        )
        self._inter_token = histogram(
            "inter_token_latency_seconds",
            "Between two tokens of a request.",
            model,
            buckets=_INTER_TOKEN_SECONDS,
        )
        self._duration = histogram(
            "request_duration_seconds", "From arrival to the end.", model, buckets=_REQUEST_SECONDS
        )
        self._rows = histogram(
            "step_rows", "Token rows of a step.", ("model", "phase"), buckets=_STEP_ROWS
        )
        self._phase = histogram(
            "step_phase_seconds",
            "Parts of the wall time of a step.",
            ("model", "phase"),
            buckets=_PHASE_SECONDS,
        )
        self._wall = counter("step_wall_seconds", "Wall time of all steps.", model)
        self._last_step = gauge(
            "last_step_timestamp_seconds", "Unix time at the end of the last step; 0: none.", model
        )
        self._predicted = counter(
            "step_predicted_seconds", "Time of steps by the executor's cost curve.", model
        )
        self._measured = counter(
            "step_measured_seconds", "The executor's time of the same steps.", model
        )
        self._bound = gauge(
            "step_bound_seconds",
            "Longest step that was allowed when requests decoded last; 0: no bound.",
            model,
        )
        self.executor_connected = gauge(
            "executor_connected", "1 while a session with the executor is open."
        ).labels()
        self._preemptions = counter(
            "preemptions", "Requests that lost their cached state.", ("model", "reason")
        )
        self._reconnects = counter(
            "executor_reconnects", "New connections to the executor.", ("model", "reason")
        )
        self._steps_ahead = counter(
            "steps_ahead", "Steps sent before the answer to the one ahead of them.", model
        )
        self._vain_rows = counter(
            "vain_rows", "Rows computed for requests that had ended or lost their state.", model
        )
        self._trace_bytes = counter("trace_bytes", "Bytes of requests' traces.", model)
        draft = ("model", "proposer", "position")
        self._drafts = counter(
            "draft_tokens", "Drafted tokens verified, by place in their row.", draft
        )
        self._accepted_drafts = counter(
            "accepted_draft_tokens", "Drafted tokens that were the ones drawn.", draft
        )
        self._build_info = gauge(
            "build_info", "Always 1; the labels identify the build.",
            ("version", "device", "mlx_version"),
        )  # fmt: skip
        self._version = version

    def set_build_info(self, device: str, mlx_version: str) -> None:
        """Show the executor's build beside this process's version."""
        self._build_info.clear()
        self._build_info.labels(self._version, device, mlx_version).set(1)

    @functools.cache  # noqa: B019  one object for the life of the process, few models
    def for_model(self, model: str) -> ModelMetrics:
        """Return the model's instruments; the first call makes every label value exist."""
        return ModelMetrics(
            requests_running=self._running.labels(model),
            requests_waiting=self._waiting.labels(model),
            requests_waiting_by_class={
                each: self._waiting_class.labels(model, each) for each in WaitingClass
            },
            waiting_tokens=self._waiting_tokens.labels(model),
            streams_paused=self._paused.labels(model),
            refusals={each: self._refusals.labels(model, each) for each in RefusalReason},
            requests={each: self._requests.labels(model, each) for each in Outcome},
            prompt_tokens={each: self._prompt_tokens.labels(model, each) for each in PromptSource},
            generated_tokens=self._generated.labels(model),
            queue_time=self._queue.labels(model),
            time_to_first_token=self._first_token.labels(model),
            inter_token_latency=self._inter_token.labels(model),
            request_duration=self._duration.labels(model),
            step_rows={each: self._rows.labels(model, each) for each in RowPhase},
            step_phase={each: self._phase.labels(model, each) for each in StepPhase},
            step_wall=self._wall.labels(model),
            last_step=self._last_step.labels(model),
            step_predicted=self._predicted.labels(model),
            step_measured=self._measured.labels(model),
            step_bound=self._bound.labels(model),
            preemptions={each: self._preemptions.labels(model, each) for each in PreemptionReason},
            executor_reconnects={
                each: self._reconnects.labels(model, each) for each in ReconnectReason
            },
            steps_ahead=self._steps_ahead.labels(model),
            vain_rows=self._vain_rows.labels(model),
            trace_bytes=self._trace_bytes.labels(model),
            draft_tokens=_by_draft(self._drafts, model),
            accepted_draft_tokens=_by_draft(self._accepted_drafts, model),
            has_exemplars=self._has_exemplars,
        )


def _by_draft(
    counter: Family[Counter], model: str
) -> dict[tuple[ProposerKind, DraftPosition], Counter]:
    return {
        (proposer, position): counter.labels(model, proposer, position)
        for proposer in ProposerKind
        for position in DraftPosition
    }
