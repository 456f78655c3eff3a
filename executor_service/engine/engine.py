"""Puts a model, a backend, a cache and a session together. Built and used on the engine thread."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

import psutil

from executor_service.disk_cache.tier import CLOSE_SECONDS
from executor_service.drafting.build import DraftModel, build_draft, load_draft
from executor_service.engine.backends import BLOCK_SIZE, make_backend
from executor_service.engine.capabilities import (
    KV_CLASS,
    MAX_TOP_K,
    Build,
    Capabilities,
    ModelDescription,
    SelfTestResult,
    backend_name,
    config_digest,
    device_name,
    numeric_class,
    package_version,
)
from executor_service.engine.model_runner import ModelRunner
from executor_service.engine.prefix_cache import PrefixCache, build_prefix_cache
from executor_service.engine.profile import OFF, STORED
from executor_service.engine.profile_load import load_profile
from executor_service.engine.profile_measure import measure
from executor_service.engine.profile_store import ProfileKey, ProfileStore
from executor_service.engine.profile_tune import apply_choices
from executor_service.engine.session import Session
from executor_service.engine.speed_check import SpeedCheck
from executor_service.engine.step_request import Limits
from executor_service.engine.warmup import warm_up
from executor_service.engine.weight_bytes import WeightBytes, weight_bytes
from executor_service.kv_cache.chain import CacheIdentity
from executor_service.kv_cache.manager import KvCacheManager
from executor_service.kv_cache.sizing import block_bytes, num_blocks
from executor_service.models.cache import cache_folder
from executor_service.models.load import load_model
from isobatch_kernels.build_digest import build_digest
from isobatch_kernels.float_program import apply_policy
from isobatch_kernels.kernel_policy import KernelPolicy
from isobatch_kernels.rope_table import positions_needed

if TYPE_CHECKING:
    from pathlib import Path

    from executor_service.config import ExecutorConfig
    from executor_service.models.registry import ModelLocation
    from isobatch_kernels.program import Program
    from isobatch_kernels.step import Backend

PROFILE_FOLDER: Final = "profiles"  # in the cache folder


class BackendFactory(Protocol):
    """Builds the backend that runs a Program (isobatch_kernels.dispatch.create_backend)."""

    def __call__(
        self,
        program: Program,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        backend: str,
        unit: str,
        num_threads: int,
    ) -> Backend:
        """Return the backend; raises ValueError for what it cannot run, RuntimeError without it."""
        ...


class SelfTest(Protocol):
    """Says how a backend came to be chosen."""

    def __call__(self, backend: Backend) -> SelfTestResult:
        """Return the result for the backend in use."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """A loaded model that computes steps."""

    capabilities: Capabilities
    session: Session
    backend: Backend
    kv_pool_bytes: int
    weight_bytes: WeightBytes
    speed: SpeedCheck
    profile_file: Path  # which may not exist
    prefixes: PrefixCache
    draft: DraftModel | None = None

    def close(self, disk_seconds: float = CLOSE_SECONDS) -> None:
        """Bring cached blocks to disk, stop the backend's threads and free its memory.

        A slow disk gets at most `disk_seconds`.
        """
        self.session.end()
        self.prefixes.close(disk_seconds)
        self.backend.close()
        if self.draft is not None:
            self.draft.close()


def build_engine(
    config: ExecutorConfig,
    location: ModelLocation,
    create_backend: BackendFactory,
    self_test: SelfTest,
    *,
    may_measure: bool = True,
) -> Engine:
    """Load the model and warm it up; raises ModelError or ConfigError.

    Without `may_measure` the profile is the stored one, or none.
    """
    model = load_model(location)
    # Before anything slow: a draft model that does not fit is refused.
    draft_weights = load_draft(config.draft_model, model) if config.draft_model else None
    policy = KernelPolicy(config.policy, config.threshold_rows)
    dimensions = model.program.dimensions
    machine_bytes = psutil.virtual_memory().total
    blocks = num_blocks(dimensions, BLOCK_SIZE, config.kv_memory_mb, machine_bytes)
    num_positions = positions_needed(dimensions.context_length, blocks * BLOCK_SIZE)
    program = replace(
        apply_policy(model.program, policy),
        # Nothing can be cached at the positions that are left out.
        dimensions=replace(dimensions, context_length=num_positions),
        activation_bits=config.activations,
    )
    backend = make_backend(
        config,
        program,
        create_backend,
        num_blocks=blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        source=str(location.path),
    )
    limits = Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        vocab_size=dimensions.vocab_size,
        context_length=dimensions.context_length,
        max_top_k=min(MAX_TOP_K, dimensions.vocab_size),
    )
    runner = ModelRunner(program.names, backend)
    class_id = numeric_class(
        backend.rope_digest, config.activations, policy, getattr(backend, "class_detail", "")
    )
    identity = CacheIdentity(
        class_id, KV_CLASS, model.weights_digest, config_digest(model.config), BLOCK_SIZE
    )
    prefixes = build_prefix_cache(config, identity, backend, dimensions)
    cache = KvCacheManager(blocks, BLOCK_SIZE, backend.zero_blocks, prefixes.index, prefixes.tier)
    warm_up(runner, cache, limits)
    num_threads = getattr(backend, "num_threads", config.threads)
    key = ProfileKey(
        device=getattr(backend, "device_name", "") or device_name(),
        backend=backend_name(backend.unit),
        unit=backend.unit,
        num_threads=num_threads,
        build=build_digest(backend.unit),
        weights_digest=model.weights_digest,
        numeric_class=class_id,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        num_blocks=blocks,
    )
    store = ProfileStore(cache_folder() / PROFILE_FOLDER)
    profile = load_profile(
        config.profile if may_measure or config.profile == OFF else STORED,
        key,
        store,
        lambda: measure(runner, cache, limits, backend=backend),
    )
    apply_choices(backend, dict(profile.choices))
    draft = None
    if draft_weights is not None:
        draft = build_draft(
            config,
            draft_weights[0],
            create_backend,
            key,
            store,
            num_ids=draft_weights[1],
            target_vocab_size=dimensions.vocab_size,
            may_measure=may_measure,
        )
    capabilities = Capabilities(
        model=ModelDescription.of(model, key),
        tokenizer=model.tokenizer,
        limits=limits,
        build=Build(
            version=package_version("isobatch"),
            backend=key.backend,
            device=key.device,
            unit=key.unit,
            mlx_version=package_version("mlx"),
            num_threads=num_threads,
        ),
        self_test=self_test(backend),
        profile=profile,
        draft=None if draft is None else draft.capabilities,
    )
    drafter = None if draft is None else draft.drafter
    session = Session(model.model_id, runner, cache, limits, drafter)
    return Engine(
        capabilities=capabilities,
        session=session,
        backend=backend,
        kv_pool_bytes=blocks * block_bytes(dimensions, BLOCK_SIZE),
        weight_bytes=weight_bytes(program),
        speed=SpeedCheck(runner, cache, limits, profile),
        profile_file=store.path(key),
        prefixes=prefixes,
        draft=draft,
    )
