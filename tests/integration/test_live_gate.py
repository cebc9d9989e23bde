"""The gate of a live run: real servers, and simulated users whose satisfaction with each version is known."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import httpx2
import pytest
from judge_server import Asked, judging
from servers import PALESTRA, TINY, free_port, until
from test_live import JOB, Application

from palestra_live.gate.ledger import replay
from palestra_live.gate.records import VersionStage as Stage

GATED = {
    "steps": 1000,
    "checkpoint": {"every_steps": 1},
    "live": {"idle_seconds": 6.0, "wait_seconds": 1.0, "gate": {"canary": 0.5}},
}
USERS = count()
SAID: set[str] = set()  # what users were answered
Quality = Callable[[int], float]  # share of thumbs up by version


@pytest.fixture
def application(tmp_path: Path) -> Iterator[Application]:
    made = Application(tmp_path, json.loads(json.dumps(JOB | GATED)), free_port())
    yield made
    if made.server is not None:
        made.server.kill()


def use(application: Application, quality: Quality, sessions: int) -> list[tuple[float, int]]:
    """Let new users have one session each; return when each began, and the version that served it."""
    rng = random.Random(next(USERS))

    async def all_of_them() -> list[tuple[float, int]]:
        headers = {"Authorization": f"Bearer {application.key}"}
        async with httpx2.AsyncClient(base_url=application.url, headers=headers, timeout=120) as client:

            async def one(name: str) -> tuple[float, int]:
                began = time.time()
                opened = await client.post("/live/sessions", json={"id": name, "subject": name, "train": True})
                assert opened.status_code == 200, opened.text
                version = int(opened.json()["policy"].rpartition("@step-")[2])
                call = {"model": "bot", "messages": [{"role": "user", "content": f"I am {name}"}], "max_tokens": 8}
                said = await client.post("/v1/chat/completions", json=call, headers={"x-palestra-session": name})
                assert said.status_code == 200, said.text
                SAID.add(said.json()["choices"][0]["message"]["content"])
                thumbs = "up" if rng.random() < quality(version) else "down"
                given = await client.post("/feedback", json={"id": name, "session": name, "thumbs": thumbs})
                assert given.status_code == 200, given.text
                return began, version

            return await asyncio.gather(*(one(f"u{next(USERS)}") for _ in range(sessions)))

    found = asyncio.run(all_of_them())
    settled = "SELECT count(*) FROM sessions WHERE state != 'done'"
    until(lambda: application.rows(settled) == [(0,)], "the feedback is settled", 120.0)
    return found


def stages(application: Application) -> dict[int, Stage]:
    return replay(application.run)[0].stages


def until_used(application: Application, quality: Quality, reached: Callable[[dict[int, Stage]], object]) -> None:
    """Let users come until the gate has decided."""
    for _ in range(60):
        use(application, quality, 40)
        if reached(stages(application)):
            return
    raise AssertionError(f"undecided: {stages(application)}\n{application.server and application.server.output}")


def live(now: dict[int, Stage]) -> int:
    return next(version for version, stage in now.items() if stage is Stage.LIVE)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_better_version_is_promoted_and_sent_back_when_it_loses(application: Application) -> None:
    application.start()
    until_used(application, lambda version: 1.0 if version else 0.3, live)
    better = live(stages(application))
    assert better not in {version for _, version in use(application, lambda _: 0.5, 1)} - {better}
    until_used(application, lambda version: 0.0 if version else 0.9, lambda now: now[better] is Stage.GONE_BACK)
    assert live(stages(application)) == 0
    assert 0 in {version for _, version in use(application, lambda _: 0.5, 20)}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", ["fake", "tiny"])
def test_a_run_whose_candidates_are_rejected_goes_on_from_the_live_weights(application: Application, engine) -> None:
    application.settings["live"]["gate"]["pairs"] = 20  # soon undecided, which is rejected
    if engine == "tiny":
        application.settings |= {key: TINY[key] for key in ("policies", "engine", "trainer")}
    application.start()

    def trained() -> int:
        return application.rows("SELECT count(*) FROM metric_rows", "run.db")[0][0]

    for _ in range(30):
        use(application, lambda _: 0.5, 40)
        if trained() > 11:
            break
    assert trained() > 11, application.server.output
    assert Stage.REJECTED in stages(application).values()
    assert "waits for the gate to decide" in application.server.output
    returns = [json.loads(data) for (data,) in application.rows(_RETURNED, "run.db")]
    assert returns
    rejected = [version for version, stage in stages(application).items() if stage is Stage.REJECTED]
    kept = application.run / "versions"
    assert (kept / "step-000000").is_dir()
    until(lambda: not any((kept / f"step-{version:06d}").exists() for version in rejected), "their weights are gone")
    application.server.send(signal.SIGKILL)
    application.server.wait()
    application.start("--resume")
    before = trained()
    for _ in range(10):
        use(application, lambda _: 0.5, 40)
        if trained() > before:
            break
    assert trained() > before, application.server.output


_RETURNED = "SELECT data FROM events WHERE kind = 'gate_returned' ORDER BY event_id"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", ["fake", "tiny"])
def test_a_version_that_was_made_worse_is_never_live_longer_than_its_canary(application: Application, engine) -> None:
    if engine == "tiny":
        application.settings |= {key: TINY[key] for key in ("policies", "engine", "trainer")}
    application.start()
    until_used(application, lambda version: 0.1 if version else 0.8, lambda now: Stage.REJECTED in now.values())
    application.server.kill()
    for _, _, decision in replay(application.run)[1]:
        assert decision.after is not Stage.LIVE or decision.version == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_candidate_passes_held_out_tasks_and_then_a_shadow_before_users_meet_it(application: Application) -> None:
    better = False

    def rank(asked: Asked) -> str:
        """Prefer what no user was answered, or what one was."""
        return asked.rank(lambda text: float((text in SAID) != better))

    application.settings["environment"] = {"name": "countdown", "validation_tasks": 25}
    with judging(rank) as judge:
        application.settings["judge"] = {"kind": "relative", "url": judge.url}
        application.start()
        until_used(application, lambda _: 0.5, lambda now: Stage.REJECTED in now.values())
        better = True
        until_used(application, lambda _: 0.5, lambda now: Stage.CANARY in now.values())
    decisions = [one.decision for one in replay(application.run)[1]]
    (shadow, *_) = [one for one in decisions if one.after is Stage.SHADOW]
    assert (shadow.why, shadow.data["pairs"]) == ("passed held-out tasks and audit", 25)
    (rejected, *_) = [one for one in decisions if one.after is Stage.REJECTED]
    assert rejected.why == "its replies to logged prompts are not better by the margin"
    (canary,) = [one for one in decisions if one.after is Stage.CANARY]
    assert canary.before is Stage.SHADOW
    assert canary.data["low"] > 0.0
    assert all(route == 0 for (route,) in application.rows(_SERVED_BEFORE, "gate.db"))


_SERVED_BEFORE = "SELECT version FROM routes WHERE at < (SELECT max(at) FROM decisions WHERE data LIKE '%\"canary\"%')"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_server_that_is_killed_at_any_moment_goes_on_with_the_same_decisions(application: Application) -> None:
    application.start()
    before: list = []
    for _ in range(4):
        use(application, lambda version: 1.0 if version else 0.4, 60)
        application.server.send(signal.SIGKILL)
        application.server.wait()
        _, decided = replay(application.run)
        assert decided[: len(before)] == before
        before = decided
        application.start("--resume")
    until_used(application, lambda version: 1.0 if version else 0.3, live)
    assert replay(application.run)[1][: len(before)] == before


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_person_sends_a_running_version_back_and_the_server_follows_within_two_seconds(application) -> None:
    application.start()
    until_used(application, lambda version: 1.0 if version else 0.3, live)
    order = [PALESTRA, "live", "back", application.run, "--reason", "rude replies ü"]
    done = subprocess.run(order, capture_output=True, text=True, check=True)
    assert "gone back: sent back by" in done.stdout
    time.sleep(2.0)
    use(application, lambda _: 0.5, 10)
    assert live(stages(application)) == 0
    shown = subprocess.run([PALESTRA, "live", "status", application.run], capture_output=True, text=True, check=True)
    assert "rude replies ü" in shown.stdout
    first = subprocess.run(order, capture_output=True, text=True, check=False)
    assert (first.returncode, "the first that was live" in first.stderr) == (2, True)
