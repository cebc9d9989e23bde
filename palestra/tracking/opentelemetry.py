"""OpenTelemetry: spans of steps, episodes and calls, by OTLP to the collector of OTEL_EXPORTER_OTLP_ENDPOINT."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from palestra.errors import ConnectionLost
from palestra.store.browsing import browse
from palestra.tracking.base import TrackedRun
from palestra.tracking.run_spans import RunSpan, episodes_of_step, spans_of_row

PIECE = 512  # spans of one request


class OpenTelemetryTracker:
    """Sends spans; needs `opentelemetry-sdk` and `opentelemetry-exporter-otlp-proto-http`.

    Ids depend only on the run and the span, so a resumed run sends the same ids again.
    """

    def __init__(self, run: TrackedRun) -> None:
        """Import the library, and read its variables (`OTEL_…`)."""
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
        from opentelemetry.sdk.trace.export import SpanExportResult

        ended: list[Any] = []

        class Collect(SpanProcessor):  # type: ignore[misc]
            """Stores ended spans until they are sent: the library's own queue drops spans that come too fast."""

            def on_end(self, span: Any) -> None:
                ended.append(span)

        self._run, self._trace, self._ended, self._ok = run, trace, ended, SpanExportResult.SUCCESS
        self._ids = _Ids()
        resource = Resource.create({"service.name": "palestra", "palestra.run": run.name, "palestra.run.key": run.key})
        # A step has an attribute for each metric, of which several policies have more than the library's 128.
        limits = SpanLimits(max_span_attributes=SpanLimits.UNSET)
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, span_limits=limits)
        self._provider.add_span_processor(Collect())
        self._tracer = self._provider.get_tracer("palestra")
        self._exporter = OTLPSpanExporter()

    def begin(self) -> None:
        """Begin with the first step; a collector cannot remove spans, so earlier ones are sent again."""
        self._ended.clear()

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Add the spans of a step: its own, its evaluation's, and a trace for each of their episodes."""
        links = {
            kind: [self._trace.Link(self._add(own, None, []).get_span_context())]
            for kind, own in spans_of_row(step, values, at).items()
        }
        with browse(self._run.store) as connection:
            for episode in episodes_of_step(connection, step):
                self._add(episode, None, links.get(episode.attributes["palestra.episode.kind"], []))

    def _add(self, one: RunSpan, within: Any, links: Sequence[Any]) -> Any:
        """Add a span and its children, and return it."""
        trace = self._trace
        self._ids.next = f"{self._run.key} {one.key}"
        span = self._tracer.start_span(
            one.name,
            context=trace.set_span_in_context(trace.INVALID_SPAN if within is None else within),
            kind=trace.SpanKind.CLIENT if one.kind == "client" else trace.SpanKind.INTERNAL,
            attributes=dict(one.attributes),
            links=links,
            start_time=_nanoseconds(one.start),
        )
        for child in one.children:
            self._add(child, span, [])
        if one.failed is not None:
            span.set_status(trace.Status(trace.StatusCode.ERROR, one.failed))
        span.end(end_time=_nanoseconds(max(one.end, one.start)))
        if len(self._ended) >= PIECE:  # a long episode, or a whole run, has more spans than should be kept
            self.flush()
        return span

    def flush(self) -> None:
        """Send the added spans.

        Raises:
            ConnectionLost: the collector refused them, after the library's retries.
        """
        if self._ended and self._exporter.export(tuple(self._ended)) is not self._ok:
            raise ConnectionLost(
                "the collector did not take the spans; OTEL_EXPORTER_OTLP_ENDPOINT has its URL, and "
                "`palestra track` sends them once it is there"
            )
        self._ended.clear()

    def close(self, completed: bool) -> None:
        """Close the connection to the collector."""
        self._provider.shutdown()
        self._exporter.shutdown()


class _Ids:
    """Provides the ids of the next span; the library asks for a trace id only where a trace begins."""

    def __init__(self) -> None:
        self.next = ""

    def generate_trace_id(self) -> int:
        """Return the 128 bits of the trace."""
        return int.from_bytes(hashlib.sha256(f"trace {self.next}".encode()).digest()[:16]) or 1

    def generate_span_id(self) -> int:
        """Return the 64 bits of the span."""
        return int.from_bytes(hashlib.sha256(f"span {self.next}".encode()).digest()[:8]) or 1

    def is_trace_id_random(self) -> bool:
        """Return whether a sampler may take the id for a random number: it is the beginning of a hash."""
        return True


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
