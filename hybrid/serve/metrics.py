"""/metrics in Prometheus format: the server's counters, and a snapshot of the engine's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from hybrid.engine.stats import Metrics as EngineMetrics
    from hybrid.engine.stats import PassPhase, Total
    from hybrid.serve.backend import Backend
    from hybrid.serve.models import Models

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
disable_created_metrics()
_FIRST = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
_BETWEEN = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1, 2, 5)
_WHOLE = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)


class Metrics:
    """The server's metrics in a registry of their own, so that a process may have several servers."""

    def __init__(self, models: Models) -> None:
        self.registry = CollectorRegistry()
        more: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("hybrid_requests", "Requests by endpoint and outcome", ["endpoint", "outcome"], **more)
        self.first = Histogram(
            "hybrid_time_to_first_token_seconds", "From a request's arrival to its first token", buckets=_FIRST, **more
        )
        self._between = Histogram("hybrid_inter_token_seconds", "Between a text's tokens", buckets=_BETWEEN, **more)
        self.whole = Histogram("hybrid_request_seconds", "From arrival to the end of an answer", buckets=_WHOLE, **more)
        ProcessCollector(registry=self.registry)
        self.registry.register(_Engines(models))

    def between(self, seconds: float, tokens: int) -> None:
        """Record `tokens` that arrived `seconds` after the previous one, as as many equal intervals."""
        for _ in range(tokens):
            self._between.observe(seconds / tokens)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Engines(Collector):
    """Collects the engines' snapshots and the server's state. Several models have the label `model`."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        models = self._models
        ready = float(models.state == "ready")
        yield GaugeMetricFamily("hybrid_ready", "1 while the server accepts requests", value=ready)
        found: dict[str, Metric] = {}
        for backend in models.backends.values():
            add_samples(found, _of_backend(backend), **({"model": backend.name} if backend.name else {}))
        yield from found.values()
        device = models.first.joules
        if device is not None and (joules := device.read()) is not None:
            about = "Energy of the whole device since the start"
            energy = CounterMetricFamily("hybrid_device_joules", about, labels=["source"])
            yield _with(energy, [([device.source], joules)])


def add_samples(found: dict[str, Metric], families: Iterable[Metric], **labels: str) -> None:
    """Add families to those of the same names, with more labels."""
    for family in families:
        kept = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        for s in family.samples:
            kept.add_sample(s.name, {**s.labels, **labels}, s.value)


def _of_backend(backend: Backend) -> Iterable[Metric]:
    yield CounterMetricFamily("hybrid_loads", "How often the model was loaded", value=backend.loads)
    yield CounterMetricFamily("hybrid_device_losses", "Device losses", value=backend.losses)
    if (model := backend.loaded) is not None:
        yield from _snapshot(model.metrics())


def _snapshot(m: EngineMetrics) -> Iterable[Metric]:
    """An engine's snapshot as metric families, named by its fields."""
    yield GaugeMetricFamily("hybrid_waiting", "Requests in the queue", value=m.waiting)
    yield GaugeMetricFamily("hybrid_running", "Requests that run", value=m.running)
    counts = {
        "prompt_tokens": "Prompt tokens of started requests, cached ones included",
        "cached_tokens": "Prompt tokens found in the prefix cache",
        "generated_tokens": "Generated tokens",
        "refused": "Requests refused because the queue was full",
        "passes": "Runs of a plan",
        "drafted": "Draft tokens that were verified",
        "accepted": "Draft tokens that were accepted",
        "verified": "Passes that verified draft tokens",
        "preemptions": "Sequences that were preempted to free blocks",
        "recomputed": "Rows recomputed after a preemption or an aborted step",
        "evictions": "Cached blocks that were evicted",
    }
    for name, about in counts.items():
        yield CounterMetricFamily(f"hybrid_{name}", about, value=getattr(m, name))
    finished = CounterMetricFamily("hybrid_finished", "Sequences by how they ended", labels=["reason"])
    yield _with(finished, [([reason], n) for reason, n in sorted(m.finished.items())])
    about = "Blocks of the KV cache by kind of layer and state"
    blocks = GaugeMetricFamily("hybrid_blocks", about, labels=["kind", "state"])
    states = [(kind, state, n) for kind, of in sorted(m.blocks.items()) for state, n in sorted(of.items())]
    yield _with(blocks, [([kind, state], n) for kind, state, n in states])
    yield from _work(m.work())


def _work(totals: Mapping[PassPhase, Total]) -> Iterable[Metric]:
    """Time and work of passes, by phase. Bytes and operations divided by seconds are the achieved rates."""
    shown = {
        "seconds": "Time of passes, measured on the host",
        "passes": "Runs of a plan",
        "rows": "Rows of passes",
        "nbytes": "Memory traffic of passes by their plans' declarations",
        "flops": "Arithmetic operations of passes by their plans' declarations",
    }
    names = {"nbytes": "bytes", "flops": "operations"}
    for field, about in shown.items():
        family = CounterMetricFamily(f"hybrid_device_{names.get(field, field)}", about, labels=["phase"])
        yield _with(family, [([phase], getattr(total, field)) for phase, total in sorted(totals.items())])


def _with(family: Any, samples: Iterable[tuple[list[str], float]]) -> Metric:
    """A family with samples: values by labels."""
    for labels, value in samples:
        family.add_metric(labels, value)
    return family
