"""The page of a running job: who may see it, what the viewer's key does not open, and that it follows the job."""

from __future__ import annotations

import json
import re
import threading

import httpx2
import pytest
import torch
import transformers
from servers import KEY, SCRIPTED, TINY, Job, Plane, until

API = "/dashboard/api/runs"
VALUES = {"run": "job", "step": "1", "kind": "train", "group": "0", "row": "0", "call": "0", "name": "none"}
VALUES |= {"digest": "0" * 64, "policy": "policy"}


def viewer_key(plane: Plane, key: str = KEY) -> str:
    answer = plane.post("/dashboard/session", key=key)
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    return str(answer.json()["key"])


@pytest.mark.slow
def test_the_viewers_key_opens_the_page_and_nothing_else(tmp_path):
    with Job(tmp_path, {**SCRIPTED, "steps": 100, "evaluation": {"every_steps": 0}}) as job:
        job.start()
        with Plane(job.url) as plane:
            key, episode = viewer_key(plane), plane.claim()
            assert key not in (KEY, episode["api_key"])
            assert viewer_key(plane, key) == key, "a tab may ask again"
            paths: dict[str, dict[str, object]] = plane.get("/openapi.json").json()["paths"]
            known = VALUES | {"episode": episode["episode_id"]}
            pages = [path for path in paths if path.startswith("/dashboard/api/")]
            assert len(pages) == 16
            for path, methods in paths.items():
                address = re.sub(r"\{(\w+)\}", lambda match: known[match[1]], path)
                for method in methods:
                    ask = {"headers": {"authorization": f"Bearer {key}"}, "params": {"follow": "false"}}
                    if path.startswith(f"{API}/{{run}}/episodes"):
                        ask["params"] = {}
                    found = plane.http.request(method, job.url + address, **ask)
                    if path.startswith("/dashboard/"):
                        unknown = ("{row}", "{call}", "{digest}", "{policy}")  # the episode has no call yet
                        expected = 404 if path.endswith(unknown) else 200
                        assert found.status_code == expected, (path, found.text)
                    else:
                        assert found.status_code in (401, 403), (path, found.status_code)
            for path in pages:
                address = re.sub(r"\{(\w+)\}", lambda match: known[match[1]], path)
                assert plane.get(address, key=None).status_code == 401
                assert plane.get(address, key=episode["api_key"]).status_code == 403
            assert plane.get("/dashboard", key=None).status_code == 200
            assert plane.post("/dashboard/session", key=None).status_code == 401
            assert plane.post("/dashboard/session", key=episode["api_key"]).status_code == 403
        assert key not in job.servers[-1].output


def test_only_the_jobs_key_brings_one_to_talk_which_opens_model_calls_that_leave_nothing(tmp_path):
    with Job(tmp_path, {**SCRIPTED, "steps": 100, "evaluation": {"every_steps": 0}}) as job:
        job.start()
        with Plane(job.url) as plane:
            viewer = viewer_key(plane)
            assert plane.post("/dashboard/session", key=viewer).json()["talk"] is None
            talk = plane.post("/dashboard/session").json()["talk"]
            episode, paths = plane.claim(), plane.get("/openapi.json").json()["paths"]
            known = VALUES | {"episode": episode["episode_id"], "episode_id": episode["episode_id"]}
            opened = set()
            for path, methods in paths.items():
                address = re.sub(r"\{(\w+)\}", lambda match: known.get(match[1], "x"), path)
                for method in methods:
                    headers = {"authorization": f"Bearer {talk}"}
                    found = plane.http.request(method, job.url + address, headers=headers, json={})
                    if found.status_code not in (401, 403):
                        opened.add(path)
            models = {path for path in paths if path.startswith("/v1/") and "post" in paths[path]}
            assert opened == models | {"/v1/models"}

            asked = {"model": "policy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
            for other, status in ((viewer, 403), (KEY, 403), (None, 401)):
                assert plane.post("/v1/chat/completions", asked, key=other).status_code == status
            answer = plane.post("/v1/chat/completions", asked, key=talk)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] > 0
            assert plane.post("/v1/chat/completions", asked | {"model": "other"}, key=talk).status_code == 404
            assert job.query("SELECT count(*) AS n FROM chats")[0]["n"] == 0
            assert [
                row["state"] for row in job.query("SELECT state FROM episodes WHERE claim_request_id IS NOT NULL")
            ] == ["claimed"]
        assert talk not in job.servers[-1].output


@pytest.mark.slow
def test_a_checkpoint_is_talked_to_while_the_job_trains_on(tmp_path):
    """Log-probabilities of its replies are those that transformers computes from the checkpoint's folder."""
    settings = {**TINY, "steps": 100, "evaluation": {"every_steps": 0}, "checkpoint": {"every_steps": 1, "keep": 2}}
    settings["engine"] = {**TINY["engine"], "dtype": "float32"}
    with Job(tmp_path, settings) as job:
        job.start()
        worker = job.work()
        until(lambda: len(job.manifests()) > 2, "the batch of the third step")
        worker.kill()
        last = f"policy@step-{len(job.manifests())}"
        with Plane(job.url) as plane:
            viewer, talk = viewer_key(plane), plane.post("/dashboard/session").json()["talk"]

            def checkpoints() -> list[str]:
                found = plane.get(f"{API}/job", key=viewer).json()["live"]["checkpoints"]
                return found if last in found else []

            known = until(checkpoints, "the checkpoint of the last step that has a batch")
            asked = {"prompt": [5, 6, 7], "max_tokens": 1, "temperature": 1.0, "logprobs": 0, "seed": 3}
            found = {}
            for name in (*known, "policy"):
                if name != "policy":
                    route = f"/v1/checkpoints/{name}"
                    assert plane.post(route, {}, key=viewer).status_code == 403
                    assert plane.post(route, {}, key=talk).json() == {"model": name}
                choice = plane.post("/v1/completions", asked | {"model": name}, key=talk).json()["choices"][0]
                found[name] = (choice["text"], choice["logprobs"]["token_logprobs"][0])
            assert plane.post("/v1/checkpoints/policy@step-77", {}, key=talk).status_code == 404
            first = plane.post("/v1/completions", asked | {"model": known[0]}, key=talk)
            assert (first.status_code, len(known)) == (404, 2), "one is loaded at a time"
            episode = plane.claim()
            assert plane.post(f"/v1/checkpoints/{known[0]}", {}, key=episode["api_key"]).status_code == 403
            assert job.query("SELECT count(*) AS n FROM chats WHERE policy LIKE 'policy@%'")[0]["n"] == 0
        folders = {f"policy@step-{int(path.name[5:])}": path for path in job.checkpoints()}
        for name in known:
            model = transformers.AutoModelForCausalLM.from_pretrained(folders[name], dtype="float32")
            with torch.no_grad():
                logprobs = model(torch.tensor([[5, 6, 7]])).logits[0, -1].log_softmax(-1)
            assert (logprobs - found[name][1]).abs().min() < 1e-4
        assert abs(found[known[0]][1] - found[known[1]][1]) > 1e-6


@pytest.mark.slow
def test_the_page_follows_a_job_to_its_end(tmp_path):
    with Job(tmp_path, SCRIPTED) as job:
        job.start()
        with Plane(job.url) as plane:
            before = plane.get(f"{API}/job").json()
            assert (before["state"], before["step"], before["live"]["workers"]) == ("running", 0, 0)
            kinds: list[str] = []

            def follow() -> None:
                headers = {"authorization": f"Bearer {KEY}"}
                with httpx2.stream("GET", f"{job.url}/dashboard/api/events", headers=headers, timeout=60) as answer:
                    kinds.extend(line.removeprefix("event: ") for line in answer.iter_lines() if line[:6] == "event:")

            thread = threading.Thread(target=follow)
            thread.start()
            job.work()
            until(lambda: "completed" in kinds, "the last event")
        job.finish()
        thread.join()
        rows = [json.loads(row["data"]) for row in job.query("SELECT data FROM metric_rows ORDER BY step")]
        assert kinds.count("step") == len(rows) == 4
        assert kinds[-1] == "ended", "so that the page forgets its key"
