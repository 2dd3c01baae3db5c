"""Figures in the text format of Prometheus: put together when they are asked, from plain facts.

Names end in their unit, counts in ``_total``.  Everything is read in one go on the event loop, so
that one answer is of one moment; turning it into text happens in a thread.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import TypeAlias, TypeVar

import msgspec
import trio
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import CollectorRegistry

from lensemble.histogram import Histogram
from lensemble.loop_lag import LoopLag
from lensemble.version import VERSION
from lensemble.web.hosts import names_this_machine
from lensemble.web.serving import App, Receive, Scope, Send

PREFIX = "lensemble_"
MAX_SERIES = 4096
"""Of one figure; more are left out."""

Labels = TypeVar("Labels", bound=tuple[str, ...])
"""The values of a figure's labels."""

Values: TypeAlias = Mapping[Labels, float | None]
"""None is not known and is not told."""

Collect: TypeAlias = Callable[[], Awaitable[list[Metric]]]


class Name(msgspec.Struct, frozen=True):
    """Of a figure, without the prefix, with a sentence on it and the names of its labels."""

    name: str
    what: str
    labels: tuple[str, ...] = ()


def gauge(name: Name, values: Values[Labels]) -> Metric:
    """What goes up and down."""
    made = GaugeMetricFamily(PREFIX + name.name, name.what, labels=name.labels)
    return _filled(made, values)


def counter(name: Name, values: Values[Labels]) -> Metric:
    """What only grows, as long as the daemon lives; the name goes without ``_total``."""
    made = CounterMetricFamily(PREFIX + name.name, name.what, labels=name.labels)
    return _filled(made, values)


def one(name: Name, value: float | None) -> Metric:
    """A gauge without labels."""
    return gauge(name, {(): value})


def histogram(name: Name, seen: Mapping[Labels, Histogram]) -> Metric:
    """How values are spread."""
    made = HistogramMetricFamily(PREFIX + name.name, name.what, labels=name.labels)
    for labels, each in list(seen.items())[:MAX_SERIES]:
        made.add_metric(labels, each.buckets(), each.total)
    return made


def of_daemon(kind: str, uptime_s: float, lag: LoopLag) -> list[Metric]:
    """What every daemon tells of itself."""
    build = Name("build_info", "The release that runs.", ("daemon", "version"))
    busy = "Passes of the event loop; what is ready waits so long at most."
    return [
        gauge(build, {(kind, VERSION): 1.0}),
        one(Name("uptime_seconds", "Since this daemon started."), uptime_s),
        histogram(Name("event_loop_pass_seconds", busy), {(): lag.seconds}),
    ]


def _filled(made: GaugeMetricFamily | CounterMetricFamily, values: Values[Labels]) -> Metric:
    known = [(labels, value) for labels, value in values.items() if value is not None]
    for labels, value in known[:MAX_SERIES]:
        made.add_metric(labels, value)
    return made


class _Listed:
    """A collector of what is collected already."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._metrics


async def text(collect: Collect) -> tuple[bytes, str]:
    """What ``collect`` gives, as text, and its media type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Listed(await collect()))
    made = await trio.to_thread.run_sync(partial(generate_latest, registry))
    return made, CONTENT_TYPE_PLAIN_0_0_4


def app(collect: Collect) -> App:
    """An application that has nothing but ``/metrics``."""

    async def answer(scope: Scope, _: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        content, kind, status = b"look at /metrics\n", "text/plain", 404
        host = dict(scope["headers"]).get(b"host", b"").decode(errors="replace")
        if not names_this_machine(host):
            content, status = b"ask by a loopback address\n", 421
        elif scope["path"] == "/metrics" and scope["method"] in {"GET", "HEAD"}:
            content, kind = await text(collect)
            status = 200
        headers = [
            (b"content-type", kind.encode()),
            (b"content-length", str(len(content)).encode()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    return answer
