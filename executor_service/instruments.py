"""Counters, gauges and histograms that cost a step little: plain numbers until the page asks.

Each is changed by one thread alone, in this process the event loop's; others may read. That is
what they gain over prometheus_client's own, which take locks and check themselves at every change.
Its registry and its formats serve them all the same. Each service has its own copy of this file,
because the services share no code; a test keeps the copies equal.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Generic, TypeVar

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar


class Counter:
    """A number that grows."""

    __slots__ = ("_value",)
    kind: Final = "counter"

    def __init__(self) -> None:
        self._value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add `amount`, which is not negative."""
        self._value += amount

    def show(self, metric: Metric, labels: dict[str, str]) -> None:
        """Add samples to a page."""
        metric.add_sample(f"{metric.name}_total", labels, self._value)


class Gauge:
    """A number that is as it is now."""

    __slots__ = ("_value",)
    kind: Final = "gauge"

    def __init__(self) -> None:
        self._value = 0.0

    def set(self, value: float) -> None:
        """Be `value` from now on."""
        self._value = value

    def show(self, metric: Metric, labels: dict[str, str]) -> None:
        """Add samples to a page."""
        metric.add_sample(metric.name, labels, float(self._value))


class Histogram:
    """How many values lie below each bound, and their sum."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "_sum")
    kind: Final = "histogram"

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = (*bounds, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        # The last one of each bucket that has any.
        self._exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, exemplar: Mapping[str, str] | None = None) -> None:
        """Count a value; `exemplar` stands beside it where the page's format has room for that."""
        index = bisect_left(self._bounds, value)
        self._counts[index] += 1
        self._sum += value
        if exemplar is not None:
            self._exemplars[index] = Exemplar(dict(exemplar), value, time.time())

    def show(self, metric: Metric, labels: dict[str, str]) -> None:
        """Add samples to a page."""
        total, name = 0, metric.name
        for index, (bound, count) in enumerate(zip(self._bounds, tuple(self._counts), strict=True)):
            total += count
            metric.add_sample(
                f"{name}_bucket",
                {**labels, "le": "+Inf" if bound == math.inf else str(float(bound))},
                total,
                exemplar=self._exemplars.get(index),
            )
        metric.add_sample(f"{name}_count", labels, total)
        metric.add_sample(f"{name}_sum", labels, self._sum)


_Instrument = TypeVar("_Instrument", bound=Counter | Gauge | Histogram)


class Family(Collector, Generic[_Instrument]):
    """Instruments of one name, by the values of their labels."""

    def __init__(
        self,
        make: Callable[[], _Instrument],
        name: str,
        text: str,
        label_names: Sequence[str] = (),
        *,
        registry: CollectorRegistry,
    ) -> None:
        """Show on `registry`'s pages what `make` makes for each set of values."""
        self._make = make
        self._kind = make().kind
        self._name = name.removesuffix("_total")
        self._text = text
        self._label_names = tuple(label_names)
        self._instruments: dict[tuple[str, ...], _Instrument] = {}
        registry.register(self)

    def labels(self, *values: object) -> _Instrument:
        """Return the instrument of these values, one for each label; it is made when first asked.

        Raises ValueError for another number of values.
        """
        key = tuple(map(str, values))
        if len(key) != len(self._label_names):
            raise ValueError(
                f"[{self._name}] values must be those of {self._label_names}, got {key}"
            )
        if key not in self._instruments:
            self._instruments[key] = self._make()
        return self._instruments[key]

    def clear(self) -> None:
        """Show nothing until the next one is made."""
        self._instruments = {}

    def describe(self) -> Iterator[Metric]:
        """Yield the name alone: a registry takes each once."""
        yield Metric(self._name, self._text, self._kind)

    def collect(self) -> Iterator[Metric]:
        """Yield the numbers of now; any thread may call it."""
        metric = Metric(self._name, self._text, self._kind)
        for values, instrument in tuple(self._instruments.items()):
            instrument.show(metric, dict(zip(self._label_names, values, strict=True)))
        yield metric
