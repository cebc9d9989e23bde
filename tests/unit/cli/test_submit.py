"""`palestra submit`: what it sends."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from palestra.cli.main import main


class Recording(BaseHTTPRequestHandler):
    """A control plane that keeps what is submitted."""

    bodies: list[dict]

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        resources = {"cpus": 1.0, "gpus": 0.0, "memory_gib": 0.0}
        texts = dict.fromkeys(("job_id", "name", "user", "kind", "priority", "state", "reason"), "job")
        numbers = dict.fromkeys(("created_at", "changed_at", "starts", "restarts_left"), 0)
        more = {"attached": False, "node": None, "cancel_requested": False, "config": {}, "log_tail": None}
        answer = json.dumps(texts | numbers | more | {"resources": resources}).encode()
        self.send_response(201)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def submitted(tmp_path, monkeypatch) -> Iterator[list[dict]]:
    """The bodies that a control plane got, of jobs that are submitted in a folder with `job.toml`."""
    (tmp_path / "job.toml").write_text("steps = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.excepthook", sys.excepthook)  # put back, for the command sets its own
    handler = type("Handler", (Recording,), {"bodies": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("PALESTRA_URL", f"http://127.0.0.1:{http.server_address[1]}")
        monkeypatch.setenv("PALESTRA_KEY", "key")
        yield handler.bodies
        http.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("given", "seconds"), [("45s", 45.0), ("90m", 5400.0), ("1.5h", 5400.0), ("300", 300.0), ("0.5", 0.5)]
)
def test_a_time_limit_is_sent_in_seconds(submitted, given, seconds):
    assert main(["submit", "job.toml", "--time-limit", given]) == 0
    assert [body["time_limit_seconds"] for body in submitted] == [seconds]


def test_a_job_has_no_time_limit_unless_it_says_so(submitted):
    assert main(["submit", "job.toml"]) == 0
    assert [body.get("time_limit_seconds") for body in submitted] == [None]


@pytest.mark.parametrize("given", ["", "h", "0", "-5m", "1d", "1:30", "nan", "inf", "1e400h", "90 minutes"])
def test_what_is_no_time_is_refused_with_those_that_are(submitted, capsys, given):
    with pytest.raises(SystemExit):
        main(["submit", "job.toml", f"--time-limit={given}"])
    assert "expected a time such as 45s, 90m, 1.5h" in capsys.readouterr().err
    assert submitted == []
