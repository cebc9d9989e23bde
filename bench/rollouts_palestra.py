"""Palestra's rollouts on a store on disk; prints one JSON line.

The way is that of a job: episodes are claimed, opened as sessions, played by `Runner` in an asynchronous environment
whose steps sleep, every call and every end is committed, and each trajectory, read back from the store, is merged into
rows. Only the model is missing: the fake engine answers immediately.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop
from sleeps import STEPS, Meter, Workload, workload_of

from palestra.config import PolicyConfig, Roles, RolloutConfig
from palestra.engine.fake import FakeEngine
from palestra.envs import ConcurrentEnvironment
from palestra.grammars.pool import Grammars
from palestra.http.server import tune_gc
from palestra.renderers import ByteTokenizer, ChatMLRenderer
from palestra.rollout import EpisodeResult, RolloutOrchestrator, RolloutSpec
from palestra.runners import Runner
from palestra.session import PolicyRuntime, PolicySet, SessionContext, Sessions
from palestra.store import open_run_store
from palestra.tokens import TokenTrie, rows_of
from palestra.types.messages import ChatMessage, Observation, text_message
from palestra.types.records import EpisodeRecord, Task, Trajectory

ROOT = Path(__file__).parent.parent
REPLY_TOKENS = 32
BATCH = 8  # results that the reader takes at a time
PROFILED = 15  # lines


class Sleeping(ConcurrentEnvironment):
    """Answers every action after the seconds that its task says."""

    async def start(self, task: Mapping[str, Any]) -> None:
        """Ask."""
        self._sleeps: list[float] = task["sleeps"]
        self._done = 0
        self.emit("agent", (text_message("user", "What next?"),))

    async def on_action(self, observation: Observation, action: ChatMessage) -> None:
        """Sleep, then show something."""
        await asyncio.sleep(self._sleeps[self._done])
        self._done += 1
        seen = (text_message("user", "observed"),)
        self.emit("agent", seen, parents=(observation.id,), reward=1.0, terminated=self._done == STEPS)


@contextmanager
def sessions_on_disk(synchronous: str, slots: int) -> Iterator[Sessions]:
    """A store in a folder of its own, and a policy whose replies are all the same."""
    (ROOT / "runs").mkdir(exist_ok=True)
    tokenizer = ByteTokenizer()
    renderer = ChatMLRenderer(tokenizer)
    reply = [ord("a")] * (REPLY_TOKENS - 1) + [tokenizer.eos_token_id]
    runtime = PolicyRuntime(
        name="policy",
        config=PolicyConfig.model_validate({"max_context": 4096, "sampling": {"max_tokens": REPLY_TOKENS}}),
        renderer=renderer,
        engine=FakeEngine(lambda prompt, sampling: reply),
        grammars=Grammars(),
    )
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=ROOT / "runs") as folder,
        open_run_store(
            Path(folder) / "run.db",
            RolloutConfig(lease_seconds=600.0),
            synchronous=synchronous,
        ) as store,
    ):
        context = SessionContext(
            store=store, policies=PolicySet(runtimes={"policy": runtime}, roles=Roles(default="policy")), seed=0
        )
        yield Sessions(context, max_waiting_calls=slots)


async def register(sessions: Sessions, work: Workload) -> None:
    """An episode for each row of the table; not timed."""
    for number, sleeps in enumerate(work.sleeps()):
        task = Task(task_id=f"t{number}", data={"sleeps": sleeps})
        await sessions.context.store.groups.register("train", number, 1, task, 1)


async def play(sessions: Sessions, work: Workload) -> int:
    """Play all; returns how many trajectories became the rows that they should."""
    store, runner = sessions.context.store, Runner(sessions, RolloutSpec(environment=Sleeping))

    async def claims() -> AsyncIterator[EpisodeRecord]:
        """Claim as many episodes as there are slots, and after them `BATCH` at a time."""
        count = work.slots
        while found := await store.episodes.claim_many("bench", uuid.uuid4().hex, count):
            for claim in found:
                yield claim
            count = BATCH

    orchestrator: RolloutOrchestrator[EpisodeRecord, EpisodeResult] = RolloutOrchestrator(
        runner.play_claim, max_concurrency=work.slots
    )
    playing = asyncio.create_task(orchestrator.run_producers_from_stream(claims()))
    right = 0
    async for outcomes in orchestrator.yield_batches(BATCH):
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        names = [outcome.work.episode_id for outcome in outcomes]
        right += sum(map(merged, await store.calls.trajectories(names)))
    await playing
    return right


def merged(trajectory: Trajectory) -> bool:
    """Whether the trie of the calls is one row with all that was sampled."""
    rows = rows_of(TokenTrie(trajectory.chats))
    return len(rows) == 1 and int(rows[0].loss_mask.sum()) == STEPS * REPLY_TOKENS


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the floor and the peers don't have."""
    parser.add_argument("--synchronous", choices=["FULL", "NORMAL"], default="FULL")
    parser.add_argument("--profile", action="store_true", help="print the event loop's own time by function, too")


def main() -> None:
    """Run."""
    work, arguments = workload_of(__doc__, add_options)
    profile = cProfile.Profile() if arguments.profile else None
    tune_gc()  # as `palestra run` does
    with (
        sessions_on_disk(arguments.synchronous, work.slots) as sessions,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop,
    ):
        loop.run(register(sessions, work))
        if profile is not None:
            profile.enable()
        with Meter() as meter:
            right = loop.run(play(sessions, work))
        if profile is not None:
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(PROFILED)
    meter.tell(work, right)


if __name__ == "__main__":
    main()
