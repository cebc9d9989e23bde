"""Spans of steps, episodes and calls, as a collector gets them from the real OpenTelemetry SDK."""

from __future__ import annotations

import json
import sqlite3

import pytest
from unit.building import open_store
from unit.dashboard.recorded import REWARDS, calls_of, record

from libraries.child import missing, run
from palestra.store.browsing import browse
from palestra.store.tables import episodes

pytestmark = [
    pytest.mark.libraries,
    pytest.mark.skipif(missing(), reason="no .venv-peers/libraries; `make libraries` makes it"),
]
# A collector that keeps what it gets, and the command that sends a run to it, `times` times.
SEND = """
import http.server, json, os, sys, threading
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
got = []
class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            import gzip
            body = gzip.decompress(body)
        got.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
from palestra.cli.main import main
for _ in range(%(times)d):
    assert main(["track", %(folder)r, "opentelemetry"]) in (0, None)
def value(one):
    which = one.WhichOneof("value")
    found = getattr(one, which)
    return [value(inner) for inner in found.values] if which == "array_value" else found
spans = [{
    "path": path, "name": span.name, "kind": span.kind, "trace": span.trace_id.hex(), "id": span.span_id.hex(),
    "parent": span.parent_span_id.hex(), "start": span.start_time_unix_nano / 1e9, "end": span.end_time_unix_nano / 1e9,
    "links": [link.span_id.hex() for link in span.links], "error": span.status.code == 2,
    "attributes": {one.key: value(one.value) for one in span.attributes},
    "run": {one.key: value(one.value) for one in resource.resource.attributes}["palestra.run"],
} for path, request in got for resource in request.resource_spans
  for scope in resource.scope_spans for span in scope.spans]
print("found " + json.dumps(spans))
"""
INTERNAL, CLIENT = 1, 3


def sent(folder, times: int = 1) -> list[dict]:
    lines = run(SEND % {"times": times, "folder": str(folder)}, folder).splitlines()
    (line,) = [line for line in lines if line.startswith("found ")]
    return json.loads(line.removeprefix("found "))


async def recorded(folder) -> None:
    await record(folder)
    with open_store(folder) as store:
        for step in (4, 5):
            await store.log.add_event("step", {"step": step})


async def test_steps_episodes_and_calls_are_spans_by_the_conventions(tmp_path):
    await recorded(tmp_path)
    spans = sent(tmp_path)
    assert {span["path"] for span in spans} == {"/v1/traces"}
    assert {span["run"] for span in spans} == {"recorded"}
    steps = {span["attributes"]["palestra.step"]: span for span in spans if span["name"] == "train_step"}
    assert steps.keys() == {4, 5}
    assert steps[5]["attributes"]["palestra.train.reward_mean"] == 5 / 8
    assert steps[5]["end"] - steps[5]["start"] == pytest.approx(10.0)
    of_episodes = {
        span["attributes"]["gen_ai.conversation.id"]: span for span in spans if span["name"] == "invoke_agent agent"
    }
    with browse(tmp_path / "run.db") as connection:
        ended = {row.episode_id: row.ended_at for row in connection.execute(episodes.select()) if row.ended_at}
    assert of_episodes.keys() == ended.keys()
    assert len({span["trace"] for span in of_episodes.values()}) == len(of_episodes)
    for group, rewards in REWARDS.items():
        for sample, reward in enumerate(rewards):
            name = f"train-{group:06d}-{sample:02d}"
            episode = of_episodes[name]
            assert (episode["kind"], episode["parent"], episode["error"]) == (INTERNAL, "", False)
            assert episode["links"] == [steps[5]["id"]]
            assert episode["attributes"]["palestra.reward"] == reward
            assert episode["end"] == pytest.approx(ended[name])
            calls = [span for span in spans if span["parent"] == episode["id"]]
            assert {span["trace"] for span in calls} == {episode["trace"]}
            for span, chat in zip(calls, calls_of(group, sample), strict=True):
                of = span["attributes"]
                assert (span["name"], span["kind"]) == ("chat policy", CLIENT)
                assert (of["gen_ai.operation.name"], of["gen_ai.request.model"]) == ("chat", "policy")
                assert of["gen_ai.response.model"] == f"policy@{chat.versions[-1].version}"
                assert of["gen_ai.usage.input_tokens"] == chat.prompt_tokens
                assert of["gen_ai.usage.output_tokens"] == len(chat.completion_ids)
                assert of["gen_ai.response.finish_reasons"] == [chat.finish_reason]
                assert (of["gen_ai.request.temperature"], of["gen_ai.request.max_tokens"]) == (1.0, 16)
                assert (span["start"], span["end"]) == (chat.started_at, chat.finished_at)
    assert not [span for span in spans if "hello" in json.dumps(span)], "what was said is not sent"


async def test_a_long_episode_is_sent_in_pieces_that_are_read_as_they_are_sent(tmp_path):
    await recorded(tmp_path)
    calls = 4000
    with sqlite3.connect(tmp_path / "run.db") as connection:
        names = [row[1] for row in connection.execute("PRAGMA table_info(chats)") if row[1] != "idx"]
        connection.execute(
            f"INSERT INTO chats (idx, {', '.join(names)}) WITH RECURSIVE more(n) AS (SELECT 10 UNION ALL SELECT n + 1 "
            f"FROM more WHERE n < {calls + 9}) SELECT n, {', '.join(names)} FROM more, chats "
            "WHERE episode_id = 'train-000000-00' AND idx = 0"
        )
        row = json.dumps({"step": 5} | {f"train/number_{place}": float(place) for place in range(300)})
        connection.execute("UPDATE metric_rows SET data = ? WHERE step = 5", (row,))
    connection.close()
    watch = """
import palestra_trackers.opentelemetry as module
made, alive = [0], [0, 0]
class Counted(module.RunSpan):
    __slots__ = ()
    def __init__(self, **more):
        super().__init__(**more); alive[0] += 1; alive[1] = max(alive)
    def __del__(self): alive[0] -= 1
module.RunSpan = Counted
"""
    report = "\nprint('most ' + json.dumps([alive[1], max(len(scope.spans) for _, request in got for resource in request.resource_spans for scope in resource.scope_spans)]))"  # noqa: E501
    lines = run(watch + SEND % {"times": 1, "folder": str(tmp_path)} + report, tmp_path).splitlines()
    (found,) = [json.loads(line.removeprefix("found ")) for line in lines if line.startswith("found ")]
    (most,) = [json.loads(line.removeprefix("most ")) for line in lines if line.startswith("most ")]
    of_long = [span for span in found if span["attributes"].get("gen_ai.conversation.id") == "train-000000-00"]
    assert sum(span["name"] == "chat policy" for span in of_long) == calls + 2
    assert len({span["id"] for span in of_long}) == len(of_long)
    assert most[0] < 10, "spans that are made and not yet handed over"
    assert most[1] <= 512
    (step,) = [span for span in found if span["attributes"].get("palestra.train.number_299") == 299.0]
    assert step["name"] == "train_step"


async def test_what_is_sent_again_has_the_same_ids(tmp_path):
    await recorded(tmp_path)
    spans = sent(tmp_path, times=2)
    known = [(span["trace"], span["id"], span["parent"], span["name"]) for span in spans]
    assert len(known) == 2 * len(set(known))


async def test_a_collector_that_is_not_there_is_one_line(tmp_path):
    await recorded(tmp_path)
    code = """
import os, sys
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"], os.environ["OTEL_EXPORTER_OTLP_TIMEOUT"] = "http://127.0.0.1:9", "1"
from palestra.cli.main import main
print("code", main(["track", %r, "opentelemetry"]))
"""
    assert "code 2" in run(code % str(tmp_path), tmp_path)
