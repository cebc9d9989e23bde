"""A harness in a box: it calls the model by the one way out, and its workspace is scored outside."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from in_process import serving, trajectory_of
from machine import require

from palestra.client import AsyncClient, ModelEndpoint
from palestra.client.worker import Worker
from palestra.config import HarnessConfig
from palestra.errors import ConfigError, RolloutFailed
from palestra.sandbox import SandboxSpec
from palestra_harness import Harness, HarnessRollout
from palestra_harness.boxed import run_in_box
from palestra_harness.harness import box_of
from palestra_harness.running import RunLimits
from palestra_sandboxes.bubblewrap.program import family_of
from palestra_sandboxes.container.engine import PREFIX, owner

pytestmark = pytest.mark.ci

require("bwrap", "git")
SETTINGS = {"rollout": {"group_size": 2, "groups_per_step": 1}, "steps": 1, "evaluation": {"every_steps": 0}}
CODER = r"""
address=${1#http://}; host=${address%%/*}
body="{\"model\": \"$MODEL\", \"messages\": [{\"role\": \"user\", \"content\": \"$2\"}]}"
exec 3<> /dev/tcp/${host%:*}/${host#*:}
printf 'POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\n' "$host" "$KEY" >&3
printf 'Content-Type: application/json\r\nContent-Length: %s\r\n\r\n%s' "${#body}" "$body" >&3
cat <&3 > answer.txt
env > seen.txt; cat ~/settings.json >> seen.txt; ls / >> seen.txt
rm gone.txt; ln -s given.txt inside; ln -s /etc/passwd outside; echo end of the program
setsid sleep 4325 > /dev/null 2>&1 &
"""
HARNESS = Harness(
    name="coder",
    command=("bash", "-c", CODER, "coder", "{base_url}", "{task}"),
    variables={"KEY": "{api_key}", "MODEL": "{model}"},
    files={"settings.json": '{"key": "{api_key}"}'},
)

NOWHERE = ModelEndpoint(base_url="http://127.0.0.1:9/v1", api_key="pe-key", model="policy", version="0.0")


@pytest.fixture(params=["bubblewrap", "container"])
def settings(request) -> dict:
    image = request.getfixturevalue("tiny_image") if request.param == "container" else None
    return {"image": image, "memory_mib": 256, "disk_mib": 32}


async def test_it_plays_an_episode_and_does_not_see_the_key(tmp_path: Path, settings, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "of the user")
    (tmp_path / "given").mkdir()
    for name in ("given.txt", "gone.txt"):
        (tmp_path / "given" / name).write_text("given")
    keys, scored = [], []

    def score(task, result) -> float:
        seen = (result.workspace / "seen.txt").read_text()
        assert not [key for key in keys if key in seen]
        assert "KEY=sandbox-" in seen
        assert "of the user" not in seen
        assert (result.exit_code, result.output) == (0, "end of the program\n")
        assert (result.workspace / "inside").read_text() == "given"
        assert not (result.workspace / "outside").is_symlink()
        assert not (result.workspace / "gone.txt").exists()
        assert "answer.txt" in result.diff
        assert "gone.txt" in result.diff
        scored.append(result)
        return float(len(scored))

    rollout = HarnessRollout(
        HARNESS, score, folder=tmp_path / "given", box=box_of(HarnessConfig(name="coder", sandbox=settings).sandbox)
    )

    async def play(task: dict, endpoint: ModelEndpoint):
        keys.append(endpoint.api_key)
        return await rollout(task, endpoint)

    async with serving(tmp_path, **SETTINGS) as job:
        running = asyncio.create_task(job.run())
        async with AsyncClient(job.url, job.api_key) as client:
            await client.push_tasks([{"prompt": "Say hello."}])
            await Worker(client, play, 1).run()
        await running
        played = [await trajectory_of(job, f"train-000000-0{sample}") for sample in range(2)]
    assert sorted(one.episode.reward for one in played) == [1.0, 2.0]
    assert {one.chats[0].messages[0].text for one in played} == {"Say hello."}
    assert {one.chats[0].reply.text for one in played} == {result.answer for result in scored}


@pytest.mark.parametrize(
    ("code", "limits", "expected"),
    [
        ("sleep 60", {"timeout_seconds": 0.5}, "longer than"),
        ("yes", {}, "wrote more"),
        ("for i in 1 2 3 4; do head -c 20000000 /dev/zero > $i; done", {}, "the workspace"),
    ],
)
async def test_what_runs_too_long_or_leaves_too_much_fails_if_the_calls_are_unknown(
    monkeypatch, code: str, limits: dict, expected: str
):
    monkeypatch.setattr("palestra_harness.rollout.CALLS_SECONDS", 0.5)
    box = box_of(HarnessConfig(name="x", sandbox={"memory_mib": 512, "disk_mib": 100}).sandbox)
    harness = Harness(name="own", command=("bash", "-c", code))
    with pytest.raises(RolloutFailed, match=expected):
        await HarnessRollout(harness, lambda task, result: 1.0, box=box, **limits)({"prompt": "x"}, NOWHERE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "breaks",
    [
        "exec 3>&-; sleep 60",
        "yes",
        "for i in 1 2 3 4; do head -c 20000000 /dev/zero > $i; done",
        "setsid sleep 60 & while :; do :; done",
    ],
)
async def test_a_program_that_breaks_its_box_after_a_reply_forfeits_and_gets_no_second_chance(tmp_path, breaks: str):
    harness = replace(HARNESS, command=("bash", "-c", f"{CODER.split('env >')[0]}\n{breaks}", *HARNESS.command[3:]))
    box = box_of(HarnessConfig(name="coder", sandbox={"memory_mib": 512, "disk_mib": 100}).sandbox)
    # The least that is known: a score of -1 was seen, so that breaking the box is no better than losing.
    rollout = HarnessRollout(HARNESS, lambda task, result: -1.0, box=box, timeout_seconds=3.0)
    breaking = HarnessRollout(harness, lambda task, result: 1.0, box=box, timeout_seconds=3.0, forfeit_reward=-2.0)
    calls = []

    async def play(task: dict, endpoint: ModelEndpoint):
        calls.append(endpoint)
        if len(calls) == 1:
            return await rollout(task, endpoint)
        if len(calls) == 2:
            rollout.harness = harness
            return await rollout(task, endpoint)
        return await breaking(task, endpoint)

    settings = SETTINGS | {"rollout": {"group_size": 3, "groups_per_step": 1}}
    async with serving(tmp_path, **settings) as job:
        running = asyncio.create_task(job.run())
        async with AsyncClient(job.url, job.api_key) as client:
            await client.push_tasks([{"prompt": "Say hello."}])
            worker = Worker(client, play, 1)
            await worker.run()
        await running
        played = [(await trajectory_of(job, f"train-000000-0{sample}")).episode for sample in range(3)]
    assert sorted(one.reward for one in played) == [-2.0, -1.0, -1.0]
    assert sum(one.forfeited for one in played) == 2
    assert [one.attempts for one in played] == [1, 1, 1]
    assert worker.counts["failed"] == 0


async def test_a_program_that_has_used_up_its_calls_is_ended_and_its_workspace_comes_out(tmp_path: Path):
    async def reached() -> bool:
        return True

    harness = Harness(name="own", command=("bash", "-c", "echo x > made; sleep 60"))
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    result = await run_in_box(harness, NOWHERE, "x", workspace, SandboxSpec(), RunLimits(30.0, 100_000, reached))
    assert (result.truncated, result.exit_code) == (True, -9)
    assert (workspace / "made").read_text() == "x\n"


def test_a_box_that_can_not_be_had_is_refused_before_the_first_episode():
    box = box_of(HarnessConfig(name="x", sandbox={"cpus": 1}).sandbox)
    with pytest.raises(ConfigError, match="cpus"):
        HarnessRollout(HARNESS, lambda task, result: 1.0, box=box)


def boxes(containers: bool) -> list[str]:
    """Names of this process's containers, or processes of bubblewrap below it."""
    if containers:
        command = ["podman", "ps", "-a", "--filter", f"name=^{PREFIX}{owner()}-", "--format", "{{.Names}}"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    found = []
    for one in family_of(os.getpid()):
        with suppress(OSError):
            if Path(f"/proc/{one}/comm").read_text() == "bwrap\n":
                found.append(str(one))
    return found


def kill_box(box: str) -> None:
    if box.isdigit():
        os.kill(int(box), signal.SIGKILL)
    else:
        subprocess.run(["podman", "rm", "-f", "-t", "0", box], capture_output=True, check=True)


def left_over(mark: str) -> list[str]:
    """Processes with a mark in their command."""
    found = []
    for one in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if mark.encode() in one.read_bytes():
                found.append(one.parent.name)
    return found


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("settings", "episodes"),
    [("bubblewrap", 200), ("container", 24), pytest.param("container", 200, marks=pytest.mark.long)],
    indirect=["settings"],
)
async def test_boxes_killed_at_random_are_no_rewards_and_leave_nothing(tmp_path, settings, episodes, monkeypatch):
    mark, source, killed = f"mark-{os.getpid()}-{episodes}", random.Random(7), Counter()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    code = f"setsid bash -c 'sleep 600; :' {mark} > /dev/null 2>&1 &\n{CODER}\nsleep 0.3"
    harness = replace(HARNESS, command=("bash", "-c", code, *HARNESS.command[3:]))
    box, containers = box_of(HarnessConfig(name="coder", sandbox=settings).sandbox), settings["image"] is not None
    scored: Counter[int] = Counter()

    def score(task, result) -> float:
        assert result.exit_code == 0
        scored[task["number"]] += 1
        return 1.0

    async def kill_some() -> None:
        seen: set[str] = set()
        while True:
            for one in set(await asyncio.to_thread(boxes, containers)) - seen:
                seen.add(one)
                if source.random() < 0.3:
                    threading.Timer(source.random() * (10 if containers else 1), kill, (one,)).start()
            await asyncio.sleep(0.05)

    def kill(one: str) -> None:
        with suppress(ProcessLookupError, subprocess.CalledProcessError):
            kill_box(one)
            killed[one] += 1

    rollout = HarnessRollout(harness, score, box=box, forfeit_reward=-1.0)
    settings = SETTINGS | {"rollout": {"group_size": 2, "groups_per_step": episodes // 2, "max_attempts": 20}}
    async with serving(tmp_path, **settings) as job:
        running, killing = asyncio.create_task(job.run()), asyncio.create_task(kill_some())
        async with AsyncClient(job.url, job.api_key) as client:
            await client.push_tasks([{"prompt": "Say hello.", "number": number} for number in range(episodes // 2)])
            worker = Worker(client, rollout, 4)
            await worker.run()
        killing.cancel()
        await running
        ids = [f"train-{group:06d}-0{sample}" for group in range(episodes // 2) for sample in range(2)]
        played = [(await trajectory_of(job, one)).episode for one in ids]
    print(episodes, "episodes,", len(killed), "boxes killed,", worker.counts)
    assert {one.reward for one in played} == {1.0}
    assert not any(one.forfeited for one in played)
    assert worker.counts["failed"] == sum(one.attempts - 1 for one in played)
    assert worker.counts["failed"] > episodes / 20
    assert sum(scored.values()) == episodes
    assert not boxes(containers)
    assert not left_over(mark)
    left = [path for path in temporary.rglob("*") if path.name != "lock"]
    assert [path.parent for path in left] == [temporary], left
