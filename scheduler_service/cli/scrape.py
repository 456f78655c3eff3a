"""Reads the metrics pages of both services, and works out what happened between two readings."""

from __future__ import annotations

import math
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

_LINE: Final = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SECONDS: Final = 2.0

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Page:
    """The samples of one reading, and when it was taken (monotonic seconds)."""

    at: float
    samples: dict[str, dict[Labels, float]] = field(default_factory=dict)

    def lines(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        """Give the samples of that name that have these labels."""
        for found, value in self.samples.get(name, {}).items():
            if labels.items() <= dict(found).items():
                yield dict(found), value

    def total(self, name: str, **labels: str) -> float:
        """Return the sum over the samples of that name that have these labels."""
        return sum(value for _, value in self.lines(name, **labels))

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Return sums by the value of one label."""
        sums: dict[str, float] = {}
        for found, value in self.lines(name, **labels):
            sums[found[label]] = sums.get(found[label], 0.0) + value
        return sums


def parse(text: str, at: float) -> Page:
    """Return the samples of a page in Prometheus's text format; other lines are left out."""
    page = Page(at)
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        name, labels, value = found.groups()
        key = tuple(sorted(_LABEL.findall(labels or "")))
        page.samples.setdefault(name, {})[key] = float(value)
    return page


def read(port: int) -> Page | None:
    """Read the page at a port of the loopback address; None where nothing answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=_SECONDS) as reply:
            text = reply.read().decode("utf-8", "replace")
    except (OSError, urllib.error.URLError):
        return None
    return parse(text, time.monotonic())


@dataclass(frozen=True, slots=True)
class Change:
    """What happened between two readings of one process."""

    before: Page
    now: Page

    def rate(self, name: str, **labels: str) -> float:
        """Return a counter's growth per second; 0 across a restart."""
        seconds = self.now.at - self.before.at
        grown = self.now.total(name, **labels) - self.before.total(name, **labels)
        return max(0.0, grown) / seconds if seconds > 0 else 0.0

    def rates(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Return growth per second by the value of one label."""
        values = self.now.by(name, label, **labels)
        return {each: self.rate(name, **{**labels, label: each}) for each in values}

    def ratio(self, part: str, whole: str) -> float | None:
        """Return the growth of one counter over that of another; None where that is nothing."""
        divisor = self.rate(whole)
        return self.rate(part) / divisor if divisor > 0 else None

    def quantile(self, name: str, q: float) -> float | None:
        """Return a quantile of a histogram's new observations; None without any.

        Within a bucket, observations are taken to be spread evenly, as Prometheus does.
        """
        grown = self.rates(f"{name}_bucket", "le")
        counts = sorted((math.inf if le == "+Inf" else float(le), n) for le, n in grown.items())
        if not counts or counts[-1][1] <= 0:
            return None
        wanted = q * counts[-1][1]
        lower_bound, below = 0.0, 0.0
        for bound, count in counts:
            if count >= wanted:
                if math.isinf(bound):
                    return lower_bound
                share = (wanted - below) / (count - below) if count > below else 1.0
                return lower_bound + (bound - lower_bound) * share
            lower_bound, below = bound, count
        return None


def summary(scheduler: Change | None, executor: Change | None) -> dict[str, Any]:
    """Return what is worth a look, as plain data; parts whose process does not answer are None."""
    return {
        "scheduler": None if scheduler is None else _scheduler(scheduler),
        "executor": None if executor is None else _executor(executor),
    }


def _scheduler(change: Change) -> dict[str, Any]:
    now, prefix = change.now, "isobatch_scheduler"
    return {
        "generated_tokens_per_second": change.rate(f"{prefix}_generated_tokens_total"),
        "prompt_tokens_per_second": change.rates(f"{prefix}_prompt_tokens_total", "source"),
        "requests_per_second": change.rates(f"{prefix}_requests_total", "outcome"),
        "running": now.total(f"{prefix}_requests_running"),
        "waiting": now.total(f"{prefix}_requests_waiting"),
        "time_to_first_token_seconds": _quantiles(change, f"{prefix}_time_to_first_token_seconds"),
        "inter_token_latency_seconds": _quantiles(change, f"{prefix}_inter_token_latency_seconds"),
        "step_phase_share": _shares(change.rates(f"{prefix}_step_phase_seconds_sum", "phase")),
        "executor_connected": now.total(f"{prefix}_executor_connected") > 0,
        "resident_bytes": now.total("process_resident_memory_bytes"),
    }


def _executor(change: Change) -> dict[str, Any]:
    now, prefix = change.now, "isobatch_executor"
    linear = change.rates(f"{prefix}_kernel_dispatches_total", "path", op="linear")
    return {
        "model": next((each["model"] for each, _ in now.lines(f"{prefix}_model_info")), ""),
        "unit": next((each["unit"] for each, _ in now.lines(f"{prefix}_build_info")), ""),
        "steps_per_second": change.rate(f"{prefix}_steps_total"),
        "rows_per_step": change.ratio(f"{prefix}_step_rows_sum", f"{prefix}_step_rows_count"),
        "linear_path_share": _shares(linear),
        "weight_bytes_per_second": change.ratio(
            f"{prefix}_weight_bytes_read_total", f"{prefix}_forward_seconds_sum"
        ),
        "kv_blocks": now.by(f"{prefix}_kv_blocks", "state"),
        "non_finite_rows": now.total(f"{prefix}_non_finite_rows_total"),
        "resident_bytes": now.total("process_resident_memory_bytes"),
    }


def _quantiles(change: Change, name: str) -> dict[str, float | None]:
    return {f"p{round(q * 100)}": change.quantile(name, q) for q in (0.5, 0.95)}


def _shares(values: dict[str, float]) -> dict[str, float]:
    total = sum(values.values())
    return {name: value / total if total > 0 else 0.0 for name, value in values.items()}
