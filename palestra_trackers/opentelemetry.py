"""OpenTelemetry: spans of steps, episodes and calls, by OTLP to the collector of OTEL_EXPORTER_OTLP_ENDPOINT."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from sqlalchemy import Connection, func, select

from palestra.errors import ConnectionLost
from palestra.store.browsing import browse
from palestra.store.codec import unpack
from palestra.store.tables import OF_GROUP, chats, episodes, groups
from palestra.tracking.registry import TrackedRun
from palestra.types.calls import PolicyVersion
from palestra.types.records import ON_PURPOSE

PROVIDER = "palestra"
CALLS = 64  # that are read together


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpan:
    """A span without library-specific ids.

    Attributes:
        key: identifies the span in its run; the same after a restart.
        start: Unix seconds.
        end: Unix seconds.
        failed: reason of its failure, if any.
        children: nested spans, created during iteration, once: a long episode has many.
    """

    key: str
    name: str
    kind: str
    start: float
    end: float
    attributes: Mapping[str, Any]
    failed: str | None = None
    children: Iterable[RunSpan] = field(default=())


def spans_of_row(step: int, values: Mapping[str, float], at: float) -> dict[str, RunSpan]:
    """Return the spans of a step and of the evaluation after it, by kind of their episodes.

    A row is written after the evaluation, so the step itself ended earlier. Step 0 is only an evaluation. `at`: Unix
    seconds when the row was written.
    """
    attributes: dict[str, Any] = {"palestra.step": step}
    attributes |= {f"palestra.{name.replace('/', '.')}": value for name, value in values.items()}
    found, end = dict[str, RunSpan](), at
    if (evaluating := values.get("time/validation_seconds")) is not None:
        end = at - evaluating
        own = {name: value for name, value in attributes.items() if "validation" in name or name == "palestra.step"}
        found["validation"] = RunSpan(
            key=f"evaluation {step}", name="evaluation", kind="internal", start=end, end=at, attributes=own
        )
    if step:
        start = end - values.get("time/step_seconds", 0.0)
        found["train"] = RunSpan(
            key=f"step {step}", name="train_step", kind="internal", start=start, end=end, attributes=attributes
        )
    return found


def episodes_of_step(connection: Connection, step: int) -> Iterator[RunSpan]:
    """Yield a span with nested calls for each ended episode of a step. `step`: the step that trains the episodes or,
    for validation, before which they are scored.
    """
    wanted = select(episodes).join(groups, OF_GROUP).where(groups.c.step == step, episodes.c.ended_at.is_not(None))
    for row in connection.execute(wanted.order_by(episodes.c.episode_id)).all():
        mine = (chats.c.episode_id == row.episode_id) & (chats.c.fence == row.fence)
        began, ended = connection.execute(
            select(func.min(chats.c.started_at), func.max(chats.c.finished_at)).where(mine)
        ).one()
        first = connection.execute(select(chats.c.agent).where(mine).order_by(chats.c.idx).limit(1)).scalar()
        begins = [at for at in (row.claimed_at, began) if at is not None]
        left_out = row.reason is not None and row.reason.startswith(ON_PURPOSE)
        agent = "agent" if first is None else first
        rewards = {} if row.rewards is None or row.state != "completed" else orjson.loads(row.rewards)
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.agent.name": agent,
            "gen_ai.conversation.id": row.episode_id,
            "palestra.step": step,
            "palestra.episode.kind": row.kind,
            "palestra.episode.state": row.state,
            "palestra.episode.attempts": row.attempts,
            "palestra.task.id": row.task_id,
        }
        if rewards:
            attributes["palestra.reward"] = float(sum(rewards.values()))
        yield RunSpan(
            key=f"{row.episode_id}.{row.fence}",
            name=f"invoke_agent {agent}",
            kind="internal",
            start=min(begins, default=row.ended_at),
            end=row.ended_at if ended is None else max(row.ended_at, ended),
            attributes=attributes,
            failed=row.reason if row.state == "discarded" and not left_out else None,
            children=_calls(connection, row),
        )


def _calls(connection: Connection, episode: Any) -> Iterator[RunSpan]:
    """Yield the calls of an episode's last lease."""
    mine = select(chats).where(chats.c.episode_id == episode.episode_id, chats.c.fence == episode.fence)
    for row in connection.execute(mine.order_by(chats.c.idx)).yield_per(CALLS):
        versions = orjson.loads(row.versions)
        newest = str(PolicyVersion(*versions[-1][:2])) if versions else ""
        yield RunSpan(
            key=f"{row.episode_id}.{row.fence}.{row.idx}",
            name=f"chat {row.policy}",
            kind="client",
            start=row.started_at,
            end=row.finished_at,
            attributes={
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.agent.name": row.agent,
                "gen_ai.conversation.id": row.episode_id,
                "gen_ai.request.model": row.policy,
                "gen_ai.response.model": f"{row.policy}@{newest}",
                "gen_ai.request.temperature": row.temperature,
                "gen_ai.request.max_tokens": row.max_tokens,
                "gen_ai.usage.input_tokens": row.shared + len(unpack(row.prompt_tail, "i4")),
                "gen_ai.usage.output_tokens": sum(count for _, _, count in versions),
                "gen_ai.response.finish_reasons": [row.finish_reason],
                "palestra.call": row.idx,
            },
        )


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
        """Send the added spans. Raises ConnectionLost if the collector refused them, after the library's retries."""
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
