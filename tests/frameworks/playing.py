"""Plays an agent of a framework, in the frameworks' own environment, against the real server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h11
from integration.in_process import Reply, episode_of, parts_of, renderer_of, serving, trajectory_of

from palestra.client import AsyncClient
from palestra.renderers import ChatMLRenderer
from palestra.types.calls import Chat

HERE = Path(__file__).parent
PEERS = HERE.parents[1] / ".venv-peers"
AGENTS = HERE / "agents"
OLDER_CLIENT = ("autogen", "crewai", "haystack", "litellm", "llamaindex", "smolagents")  # with openai 2
AGENT_SECONDS = 120.0
QUIET = {"OMP_NUM_THREADS": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # no tables from the network
SCRIPTED: Mapping[str, Any] = {
    "policies": {"policy": {"model": "tiny-random", "max_context": 20_000, "sampling": {"max_tokens": 1000}}}
}


class AgentFailed(AssertionError):
    """An agent ended with an exception; the message has the end of what it said."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """One request that a framework sent."""

    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Played:
    """An agent's episode."""

    answers: tuple[str, ...]  # what the agent printed
    chats: tuple[Chat, ...]  # what the server recorded
    sent: tuple[Sent, ...]  # what went over the wire

    @property
    def forks(self) -> list[str | None]:
        """Why each call left the exact tokens; None: it did not."""
        return [None if chat.fork is None else chat.fork.reason.value for chat in self.chats]

    @property
    def drifted(self) -> int:
        """Calls that meant to go on from exact tokens, and could not."""
        return sum(chat.fork is not None and chat.fork.reason.is_drift for chat in self.chats)

    @property
    def fields(self) -> set[str]:
        """Top-level fields of all bodies."""
        return {name for request in self.sent for name in request.body}


ENVIRONMENTS = {"frameworks": HERE / "requirements.txt", "more-frameworks": HERE / "more-requirements.txt"}


def python_of(framework: str) -> Path:
    """The interpreter of a framework's environment."""
    return PEERS / ("more-frameworks" if framework in OLDER_CLIENT else "frameworks") / "bin" / "python"


def missing() -> str | None:
    """Why nothing can be played; None: both environments are there, with the versions of their requirements."""
    for name, requirements in ENVIRONMENTS.items():
        installed = PEERS / name / "installed.txt"  # a copy of the requirements, made when all of them were installed
        if not installed.exists():
            return f"the environment {name} is not there"
        if installed.read_text() != requirements.read_text():
            return f"the environment {name} has other versions than {requirements.name}"
    return None


async def play(
    framework: str, scenario: str, *options: str, folder: Path, reply: Reply | None = None, **settings: Any
) -> Played:
    """Play one episode. `reply`: what a scripted model says; None: the model of `settings` is there.

    Raises:
        AgentFailed: the agent ended with an exception.
    """
    return await play_script(
        AGENTS / f"{framework}_agent.py",
        scenario,
        *options,
        folder=folder,
        reply=reply,
        framework=framework,
        **settings,
    )


async def play_script(
    script: Path, *options: str, folder: Path, reply: Reply | None = None, framework: str = "langgraph", **settings: Any
) -> Played:
    """Likewise, of any script with the command line of `agents/`, in the environment of a framework."""
    parts = None
    if reply is not None:
        _, tokenizer = renderer_of("tiny-random")
        parts = parts_of(ChatMLRenderer(tokenizer), tokenizer, reply)
        settings = {**SCRIPTED, **settings}
    sent: list[Sent] = []
    async with serving(folder, parts, **settings) as job:
        async with episode_of(job) as (client, episode_id), overheard(client.base_url.port or 0, sent) as port:
            output = await run_agent(framework, script, f"http://127.0.0.1:{port}/v1", client.api_key, *options)
        chats = (await trajectory_of(job, episode_id)).chats
    return Played(answers=answers_of(output), chats=chats, sent=tuple(sent))


async def train(framework: str, *, folder: Path, reply: Reply, episodes: int) -> list[tuple[str, ...]]:
    """RolloutSpec training episodes, of which a job makes one step; the answers of each.

    Raises:
        AgentFailed: an agent ended with an exception.
    """
    _, tokenizer = renderer_of("tiny-random")
    parts = parts_of(ChatMLRenderer(tokenizer), tokenizer, reply)
    one_step: dict[str, Any] = {"steps": 1, "rollout": {"group_size": episodes, "groups_per_step": 1}}
    answers = []
    async with serving(folder, parts, **SCRIPTED, **one_step) as job:
        running = asyncio.create_task(job.run())
        async with AsyncClient(job.url, job.api_key) as client:
            await client.push_tasks([{"text": "the shop"}])
            for number in range(episodes):
                episode = await client.begin_episode()
                assert episode is not None
                assert episode.kind == "train"
                script = AGENTS / f"{framework}_agent.py"
                output = await run_agent(framework, script, episode.base_url, episode.api_key, "talk")
                answers.append(answers_of(output))
                await client.end_episode(episode, float(number))
            assert await client.begin_episode() is None
        await running
    return answers


def answers_of(output: str) -> tuple[str, ...]:
    """What an agent printed in its last line."""
    return tuple(json.loads(output.splitlines()[-1])["answers"])


async def run_agent(framework: str, script: Path, base_url: str, api_key: str, *options: str) -> str:
    """What the agent printed.

    Raises:
        AgentFailed: the agent ended with an exception.
    """
    arguments = (*options, "--base-url", base_url, "--api-key", api_key, "--model", "policy")
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        str(python_of(framework)), str(script), *arguments, stdout=-1, stderr=-1, env=environment | QUIET
    )
    try:
        async with asyncio.timeout(AGENT_SECONDS):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise AgentFailed(f"{script.name} {' '.join(arguments)}\n{err.decode(errors='replace')[-3000:]}")
    return out.decode()


@asynccontextmanager
async def overheard(server_port: int, sent: list[Sent]) -> AsyncIterator[int]:
    """A port that passes all bytes to the server and back as they come, and writes down the requests."""
    pipes: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        pipes.add(task)
        there, back = await asyncio.open_connection("127.0.0.1", server_port)
        heard = bytearray()
        await asyncio.gather(_pass_on(reader, back, heard), _pass_on(there, writer))
        sent.extend(_requests(bytes(heard)))
        pipes.discard(task)

    listener = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with listener:
        yield int(listener.sockets[0].getsockname()[1])
        if pipes:
            await asyncio.wait(pipes, timeout=5.0)


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter, heard: bytearray | None = None) -> None:
    with contextlib.suppress(ConnectionError):
        while piece := await source.read(65_536):
            if heard is not None:
                heard += piece
            target.write(piece)
            await target.drain()
    target.close()
    with contextlib.suppress(ConnectionError):
        await target.wait_closed()


def _requests(heard: bytes) -> list[Sent]:
    """The requests of one connection."""
    found: list[Sent] = []
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(heard)
    request: h11.Request | None = None
    body = bytearray()
    while not isinstance(event := connection.next_event(), h11.NEED_DATA | h11.ConnectionClosed):
        if event is h11.PAUSED:
            connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            connection.send(h11.EndOfMessage())
            connection.start_next_cycle()
        elif isinstance(event, h11.Request):
            request, body = event, bytearray()
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage) and request is not None:
            headers = {name.decode(): value.decode() for name, value in request.headers}
            found.append(Sent(path=request.target.decode(), headers=headers, body=json.loads(bytes(body) or b"{}")))
    return found
