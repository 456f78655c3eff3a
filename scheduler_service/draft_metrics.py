"""Numbers of speculation: what was drafted and what of it was accepted."""

from collections.abc import Iterable

from scheduler_service.fan_out import Totals
from scheduler_service.metrics import ModelMetrics
from scheduler_service.speculation import RowCounts


def count_drafts(rows: Iterable[RowCounts], totals: Totals, metrics: ModelMetrics) -> None:
    """Count the rows of a step that had drafted tokens."""
    for row in rows:
        totals.num_draft_tokens += row.num_drafted
        totals.num_accepted_draft_tokens += row.num_accepted
        metrics.count_drafts(row.kind, row.num_drafted, row.num_accepted)
