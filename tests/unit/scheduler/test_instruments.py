"""The page of our instruments is the one that prometheus_client's own would give."""

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, openmetrics

from scheduler_service.instruments import Counter, Family, Gauge, Histogram

BOUNDS = (0.00005, 0.5, 1, 2048)
VALUES = (0.0, 0.00005, 0.3, 0.5, 0.500001, 1, 7.25, 4096)
LABELS = ("model", "phase")


def _ours() -> CollectorRegistry:
    registry = CollectorRegistry()
    counter = Family(Counter, "a_steps_total", "Steps.", LABELS, registry=registry)
    gauge = Family(Gauge, "a_rows", "Rows.", registry=registry)
    histogram = Family(lambda: Histogram(BOUNDS), "a_seconds", "Time.", LABELS, registry=registry)
    counter.labels("m", "decode").inc()
    counter.labels("m", "decode").inc(2.5)
    gauge.labels().set(3)
    for value in VALUES:
        histogram.labels("m", 'a "b"\n').observe(value)
    histogram.labels("m", "idle")
    return registry


def _theirs() -> CollectorRegistry:
    registry = CollectorRegistry()
    counter = prometheus_client.Counter("a_steps_total", "Steps.", LABELS, registry=registry)
    gauge = prometheus_client.Gauge("a_rows", "Rows.", registry=registry)
    histogram = prometheus_client.Histogram(
        "a_seconds", "Time.", LABELS, buckets=BOUNDS, registry=registry
    )
    counter.labels("m", "decode").inc()
    counter.labels("m", "decode").inc(2.5)
    gauge.set(3)
    for value in VALUES:
        histogram.labels("m", 'a "b"\n').observe(value)
    histogram.labels("m", "idle")
    return registry


def test_pages_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prometheus_client.metrics._use_created", False)
    theirs, ours = _theirs(), _ours()
    assert prometheus_client.generate_latest(ours) == prometheus_client.generate_latest(theirs)
    show = openmetrics.exposition.generate_latest
    assert show(ours) == show(theirs)  # type: ignore[no-untyped-call]


def test_a_bucket_shows_its_last_exemplar() -> None:
    registry = CollectorRegistry()
    family = Family(lambda: Histogram((1, 2)), "a_seconds", "Time.", registry=registry)
    for value, name in ((0.5, "first"), (0.75, "second"), (1.5, None), (9, "third")):
        family.labels().observe(value, None if name is None else {"request_id": name})
    (metric,) = registry.collect()
    found = [
        (each.labels["le"], each.exemplar and (each.exemplar.labels, each.exemplar.value))
        for each in metric.samples
        if each.name == "a_seconds_bucket"
    ]
    assert found == [
        ("1.0", ({"request_id": "second"}, 0.75)),
        ("2.0", None),
        ("+Inf", ({"request_id": "third"}, 9)),
    ]


def test_a_name_is_taken_once() -> None:
    registry = CollectorRegistry()
    Family(Gauge, "a_rows", "Rows.", registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        Family(Counter, "a_rows", "Rows.", registry=registry)


def test_each_label_has_a_value() -> None:
    family = Family(Gauge, "a_rows", "Rows.", LABELS, registry=CollectorRegistry())
    with pytest.raises(ValueError, match=r"^\[a_rows\] values must be those of"):
        family.labels("m")
