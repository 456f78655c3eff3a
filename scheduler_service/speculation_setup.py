"""Who drafts, by the configuration and by what the executor has."""

from scheduler_service.config import SPECULATION_AUTO, SPECULATION_OFF, SchedulerConfig
from scheduler_service.speculation import (
    AdaptiveController,
    Controller,
    DraftModelProposer,
    FixedController,
    LookupProposer,
    ProposerKind,
    Speculator,
)
from scheduler_service.wire.capabilities import DraftModel


def make_speculator(config: SchedulerConfig, draft: DraftModel | None) -> Speculator | None:
    """Return what the configuration asks for; None where nobody can draft.

    Without a draft model `auto` is lookup, and `draft` is nothing.
    """
    wanted = config.speculation
    lookup = model = None
    if wanted in (ProposerKind.LOOKUP, SPECULATION_AUTO):
        lookup = LookupProposer()
    if wanted in (ProposerKind.DRAFT, SPECULATION_AUTO) and draft is not None:
        model = DraftModelProposer(draft.max_rows, draft.max_tokens, draft.context_length)
    if wanted == SPECULATION_OFF or (lookup is None and model is None):
        return None
    count, controller = config.max_draft_tokens, _controller(config)
    if config.fixed_draft_tokens:
        count = config.fixed_draft_tokens
    if draft is None:
        return Speculator(lookup, controller, count)
    return Speculator(lookup, controller, count, model, draft.cost_curve)


def _controller(config: SchedulerConfig) -> Controller:
    count = config.fixed_draft_tokens
    return FixedController(count) if count else AdaptiveController()
