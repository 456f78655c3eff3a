"""Puts the draft model together: weights, backend, cache, profile. Used on the engine thread."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from executor_service.drafting.drafter import Drafter
from executor_service.drafting.request import DraftLimits
from executor_service.drafting.vocabulary import common_ids
from executor_service.engine.backends import BLOCK_SIZE, make_backend
from executor_service.engine.capabilities import (
    DraftCapabilities,
    ModelDescription,
    backend_name,
    numeric_class,
)
from executor_service.engine.model_runner import ModelRunner
from executor_service.engine.profile import OFF, STORED, Profile
from executor_service.engine.profile_load import load_profile
from executor_service.engine.profile_measure import measure
from executor_service.engine.profile_tune import apply_choices
from executor_service.engine.step_request import Limits
from executor_service.engine.warmup import warm_up
from executor_service.kv_cache.manager import KvCacheManager
from executor_service.kv_cache.sizing import block_bytes
from executor_service.models.load import load_model
from executor_service.models.registry import locate
from isobatch_kernels.build_digest import build_digest
from isobatch_kernels.rope_table import positions_needed

if TYPE_CHECKING:
    from executor_service.config import ExecutorConfig
    from executor_service.engine.engine import BackendFactory
    from executor_service.engine.profile_store import ProfileKey, ProfileStore
    from executor_service.models.load import LoadedModel
    from isobatch_kernels.step import Backend

# Beyond so many sequences drafts do not pay: rows of neighbours fill a step as well.
MAX_NUM_SEQS: Final = 64
# Carried tokens of a request: a long prompt is caught up with over several.
MAX_NUM_BATCHED_TOKENS: Final = 512
# Of a first start, for the draft model's own cost curve.
MEASURE_NS: Final = 300_000_000


@dataclass(frozen=True, slots=True, eq=False)
class DraftModel:
    """A draft model that drafts."""

    drafter: Drafter
    description: ModelDescription
    limits: Limits
    profile: Profile
    backend: Backend
    kv_pool_bytes: int

    @property
    def capabilities(self) -> DraftCapabilities:
        """What it says about itself."""
        return DraftCapabilities(self.description, self.limits, self.profile)

    def close(self) -> None:
        """Let go of its sequences, threads and memory."""
        self.drafter.release_all()
        self.backend.close()


def load_draft(name: str, target: LoadedModel) -> tuple[LoadedModel, int]:
    """Return the draft model of that name and how many ids it has in common with the target.

    Raises ModelError where it is missing or has other tokens.
    """
    model = load_model(locate(name))
    num_ids = common_ids(target.tokenizer.tokenizer_json, model.tokenizer.tokenizer_json)
    return model, min(num_ids, target.config.vocab_size, model.config.vocab_size)


def build_draft(
    config: ExecutorConfig,
    model: LoadedModel,
    create_backend: BackendFactory,
    target_key: ProfileKey,
    store: ProfileStore,
    *,
    num_ids: int,
    target_vocab_size: int,
    may_measure: bool,
) -> DraftModel:
    """Build a loaded draft model beside its target; raises ModelError or ConfigError.

    Its pool has as many blocks as the target's: a sequence is in both. `target_key` is the key of
    the target's profile; drafts have the same build, device and threads.
    """
    dimensions, num_blocks = model.program.dimensions, target_key.num_blocks
    limits = Limits(
        max_num_seqs=min(config.max_num_seqs, MAX_NUM_SEQS),
        max_num_batched_tokens=min(config.max_num_batched_tokens, MAX_NUM_BATCHED_TOKENS),
        vocab_size=dimensions.vocab_size,
        context_length=dimensions.context_length,
        max_top_k=1,
    )
    num_positions = positions_needed(dimensions.context_length, num_blocks * BLOCK_SIZE)
    program = replace(
        model.program,
        dimensions=replace(dimensions, context_length=num_positions),
        activation_bits=config.activations,
    )
    backend = make_backend(
        config,
        program,
        create_backend,
        num_blocks=num_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        source=model.source,
    )
    runner = ModelRunner(program.names, backend)
    cache = KvCacheManager(num_blocks, BLOCK_SIZE, backend.zero_blocks)
    warm_up(runner, cache, limits)
    key = replace(
        target_key,
        build=build_digest(backend.unit),
        unit=backend.unit,
        backend=backend_name(backend.unit),
        weights_digest=model.weights_digest,
        numeric_class=numeric_class(backend.rope_digest, config.activations),
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
    )
    profile = load_profile(
        config.profile if may_measure or config.profile == OFF else STORED,
        key,
        store,
        lambda: measure(runner, cache, limits, backend=backend, budget_ns=MEASURE_NS),
    )
    apply_choices(backend, dict(profile.choices))
    drafter = Drafter(
        backend,
        cache,
        DraftLimits(limits.max_num_seqs, limits.max_num_batched_tokens, target_vocab_size),
        num_ids=num_ids,
        vocab_size=dimensions.vocab_size,
        context_length=dimensions.context_length,
    )
    return DraftModel(
        drafter=drafter,
        description=ModelDescription.of(model, key),
        limits=limits,
        profile=profile,
        backend=backend,
        kv_pool_bytes=num_blocks * block_bytes(dimensions, BLOCK_SIZE),
    )
