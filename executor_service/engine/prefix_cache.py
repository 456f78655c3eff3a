"""Puts the prefix cache together: its index, and the tier on disk where one is wanted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from executor_service.disk_cache.folder import DiskFolder
from executor_service.disk_cache.record import RecordFormat
from executor_service.disk_cache.tier import CLOSE_SECONDS, DiskTier
from executor_service.errors import ConfigError
from executor_service.kv_cache.chain import CacheIdentity, Chains
from executor_service.kv_cache.prefix_index import PrefixCounts, PrefixIndex
from executor_service.models.cache import cache_folder
from isobatch_kernels.blocks import block_shape
from isobatch_kernels.build_digest import build_digest

if TYPE_CHECKING:
    from executor_service.config import ExecutorConfig
    from isobatch_kernels.program import Dimensions
    from isobatch_kernels.step import Backend

_FOLDER: Final = "prefixes"
_MB: Final = 10**6


@dataclass(frozen=True, slots=True)
class PrefixCache:
    """What there is of it; both None when it is off."""

    index: PrefixIndex | None
    tier: DiskTier | None

    @property
    def counts(self) -> PrefixCounts:
        """Counts of the index; zeros without one."""
        return PrefixCounts() if self.index is None else self.index.counts

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Bring what no sequence holds to disk, as far as `seconds` reach."""
        if self.index is not None and self.tier is not None:
            self.tier.flush(self.index.blocks(), seconds)


def build_prefix_cache(
    config: ExecutorConfig, identity: CacheIdentity, backend: Backend, dimensions: Dimensions
) -> PrefixCache:
    """Return the prefix cache that the configuration asks for; raises ConfigError."""
    if not config.prefix_cache:
        return PrefixCache(None, None)
    index = PrefixIndex(Chains(identity))
    if not config.prefix_disk_mb:
        return PrefixCache(index, None)
    shape = block_shape(dimensions, identity.block_size)
    record_format = RecordFormat(identity, build_digest(backend.unit), shape)
    limit = config.prefix_disk_mb * _MB
    try:
        root = Path(config.prefix_disk_dir or cache_folder() / _FOLDER).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"[config] prefix_disk_dir must be in a home that exists, got {config.prefix_disk_dir}"
        ) from error
    if record_format.payload_bytes * 2 > limit:
        raise ConfigError(
            f"[config] prefix_disk_mb must hold two blocks of {record_format.payload_bytes} bytes, "
            f"got {config.prefix_disk_mb}"
        )
    try:
        folder = DiskFolder(root, record_format.namespace, limit)
    except OSError as error:
        raise ConfigError(
            f"[config] prefix_disk_dir must be a folder to write to, got {error.strerror}: {root}"
        ) from error
    return PrefixCache(index, DiskTier(folder, record_format, backend))
