"""Speculation: drafting the next tokens, so that one step can give a sequence several of them.

A proposer drafts, a controller says how much of each draft is worth its rows, and the target
verifies: a draft is accepted exactly when it is the token that would have been drawn there anyway.
So nothing but speed depends on what happens here. Pure: standard library and the core's values.
"""

from scheduler_service.speculation.control import Controller, FixedController, PlainStep
from scheduler_service.speculation.controller import AdaptiveController
from scheduler_service.speculation.costs import StepCosts, StepSeconds, assumed_curve
from scheduler_service.speculation.draft_model import DraftModelProposer
from scheduler_service.speculation.draft_work import (
    DraftedRow,
    DraftEnd,
    DraftReply,
    DraftRow,
    DraftWork,
)
from scheduler_service.speculation.lookup import LookupProposer
from scheduler_service.speculation.proposer import NO_PROPOSAL, Proposal, Proposer, ProposerKind
from scheduler_service.speculation.speculator import MAX_DRAFT_TOKENS, RowCounts, Speculator

__all__ = [
    "MAX_DRAFT_TOKENS",
    "NO_PROPOSAL",
    "AdaptiveController",
    "Controller",
    "DraftEnd",
    "DraftModelProposer",
    "DraftReply",
    "DraftRow",
    "DraftWork",
    "DraftedRow",
    "FixedController",
    "LookupProposer",
    "PlainStep",
    "Proposal",
    "Proposer",
    "ProposerKind",
    "RowCounts",
    "Speculator",
    "StepCosts",
    "StepSeconds",
    "assumed_curve",
]
