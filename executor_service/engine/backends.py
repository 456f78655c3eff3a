"""Makes the backend of a Program, with errors that name what was set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from executor_service.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from executor_service.config import ExecutorConfig
    from executor_service.engine.engine import BackendFactory
    from isobatch_kernels.program import Program
    from isobatch_kernels.step import Backend

BLOCK_SIZE: Final = 16


def make_backend(
    config: ExecutorConfig,
    program: Program,
    create_backend: BackendFactory,
    *,
    num_blocks: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    source: str,
) -> Backend:
    """Return the backend of a Program from `source`; raises ModelError or ConfigError."""
    try:
        return create_backend(
            program,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            backend=config.backend,
            unit=config.unit,
            num_threads=config.threads,
        )
    except ValueError as error:
        raise ModelError(f"{error}: {source}") from error
    except RuntimeError as error:
        raise ConfigError(f"{error}: backend {config.backend}, unit {config.unit}") from error
    except MemoryError as error:
        raise ConfigError(
            f"[config] kv_memory_mb must fit in memory, got a cache of {num_blocks} blocks"
        ) from error
