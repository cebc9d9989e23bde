"""`palestra harness check`: a harness plays a scripted task of two turns against a server of this installation."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from palestra.client import AsyncClient
from palestra.config import parse_config
from palestra.errors import RolloutFailed
from palestra.http_clients import async_http_client
from palestra.runtime.local import local_job
from palestra.runtime.terms import JobTerms
from palestra.threads import in_thread
from palestra.types.records import Task, Trajectory
from palestra_harness.harness import Harness, HarnessResult, Score
from palestra_harness.rollout import CALLS_SECONDS, HarnessRollout, episode_calls
from palestra_harness.scripted import COMMAND, ENGINE, FILE, WORD, scripted_parts

CONTEXT, REPLY = 262_144, 4096  # tokens
VERSION_SECONDS = 60.0
_VERSION = re.compile(r"\d+\.\d+(?:\.\d+)+")
TASK = f"Create the file {FILE} in the present folder, with the one line `{WORD}`: run `{COMMAND}`. Then say: done."


@dataclass(kw_only=True, slots=True)
class HarnessCheck:
    """What came of a harness's scripted task.

    Attributes:
        version: installed; empty: the program does not say.
        calls: answered model calls, of all agents.
        first_tokens: of the prompt of the first call, in tokens of SmolLM2, or bytes where `real_tokens` is false.
        refused: calls that the server has refused, by error and field.
        ignored: fields without effect, by name, where the server ignores them.
        forks: calls that could not reuse the tokens of the call that they continue, by reason.
        untrained: calls of agents that are not trained, such as for a title.
        wrote: whether the file was written.
        failure: why the episode failed; None: it did not.
        output: the end of what the program wrote.
        seconds: that the program ran.
        unknown_fields: `server.unknown_fields` of the job.
    """

    harness: Harness
    version: str = ""
    calls: int = 0
    first_tokens: int = 0
    real_tokens: bool = True
    refused: Mapping[str, int] = field(default_factory=dict)
    ignored: Mapping[str, int] = field(default_factory=dict)
    forks: Mapping[str, int] = field(default_factory=dict)
    untrained: int = 0
    wrote: bool = False
    failure: str | None = None
    output: str = ""
    seconds: float = 0.0
    unknown_fields: Literal["refuse", "ignore"] = "refuse"

    @property
    def speaks(self) -> bool:
        """Return whether the model was called, and its call of a tool was carried out."""
        return self.failure is None and self.calls > 0 and self.wrote


async def check_harness(harness: Harness, timeout_seconds: float = 300.0) -> HarnessCheck:
    """Play the scripted task, and return what was seen.

    If fields that the server does not know keep the program from playing, it plays again, and they are ignored.

    Args:
        timeout_seconds: for the program.

    Raises:
        ConfigError: the program is not installed.
    """
    version = await in_thread(lambda: installed_version(harness))
    found = await _check(HarnessCheck(harness=harness, version=version), timeout_seconds)
    if found.speaks or not found.refused:
        return found
    again = HarnessCheck(harness=harness, version=version, unknown_fields="ignore")
    again = await _check(again, timeout_seconds)
    return again if again.speaks else found


async def _check(made: HarnessCheck, timeout_seconds: float) -> HarnessCheck:
    with tempfile.TemporaryDirectory(prefix="palestra-check-") as folder:
        config = parse_config(
            {
                "name": "check",
                "run_dir": str(Path(folder) / "run"),
                "server": {"port": 0, "unknown_fields": made.unknown_fields},
                "engine": {"kind": ENGINE},
                "policies": {"policy": {"max_context": CONTEXT, "sampling": {"max_tokens": REPLY}}},
                "evaluation": {"every_steps": 0},
                "rollout": {"lease_seconds": timeout_seconds + CALLS_SECONDS},  # there are no heartbeats
            }
        )
        parts, made.real_tokens = await in_thread(lambda: scripted_parts(config, made.harness.script))
        async with local_job(config, lambda kind, data: None, terms=JobTerms(parts=parts)) as job:
            await job.plane.store.groups.register("train", 0, 1, Task(task_id="check", data={"prompt": TASK}), 1)
            async with AsyncClient(job.url, job.api_key) as client, async_http_client() as http:
                episode = await client.begin_episode()
                assert episode is not None, "it was registered before"
                try:
                    await HarnessRollout(made.harness, _score(made), timeout_seconds=timeout_seconds)(
                        episode.task, episode.policy
                    )
                except RolloutFailed as error:
                    made.failure = str(error)
                made.refused = (await episode_calls(http, episode.policy)).refused
            made.ignored = dict(job.plane.ignored)
            (played,) = await job.plane.store.calls.trajectories([episode.episode_id])
            _count(made, played)
    return made


def _score(made: HarnessCheck) -> Score:
    """Return a score function that notes what the program left."""

    def score(task: dict[str, Any], result: HarnessResult) -> float:
        written = result.workspace / FILE
        made.wrote = written.is_file() and written.read_text(encoding="utf-8", errors="replace").strip() == WORD
        made.output, made.seconds = result.output, result.seconds
        return float(made.wrote)

    return score


def _count(made: HarnessCheck, played: Trajectory) -> None:
    """Note the calls of an episode."""
    made.calls = len(played.chats)
    main = [chat for chat in played.chats if "/" not in chat.agent]
    made.untrained = sum(chat.agent.endswith("/auxiliary") for chat in played.chats)
    made.first_tokens = main[0].prompt_tokens if main else 0
    firsts = {chat.agent: chat.index for chat in reversed(played.chats)}  # which continue nothing
    later = [chat for chat in played.chats if chat.index != firsts[chat.agent]]
    made.forks = Counter(chat.fork.reason.value for chat in later if chat.fork is not None)


def installed_version(harness: Harness) -> str:
    """Return the version that a program says with `--version`; empty: it says none.

    Raises:
        ConfigError: it is not installed.
    """
    program = harness.find_program()
    if not os.path.isabs(program):
        return ""
    with tempfile.TemporaryDirectory(prefix="palestra-version-", ignore_cleanup_errors=True) as home:
        variables = {**harness.environment(Path(home), defaultdict(str)), "TMPDIR": home}
        try:
            done = subprocess.run(
                [program, "--version"],
                cwd=home,
                env=variables,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=VERSION_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return ""
    found = _VERSION.search((done.stdout + done.stderr).decode(errors="replace"))
    return "" if found is None else found[0]


def lines_of(check: HarnessCheck) -> list[str]:
    """Return what a check has found, a line for each thing."""
    tried, version = check.harness.tried, check.version or "of unknown version"
    other = (
        f"; tried was {tried}, and another version may speak otherwise"
        if check.version and tried not in ("", version)
        else ""
    )
    tokens = f"{check.first_tokens:,} {'tokens' if check.real_tokens else 'bytes'}"
    found = [
        f"{check.harness.name} {version}{other}",
        f"plays:       {'yes' if check.speaks else 'no'}, {check.calls} calls in {check.seconds:.1f} s",
        f"first call:  {tokens}",
        f"refused:     {counts_text(check.refused)}",
        f"ignored:     {counts_text(check.ignored)}",
        f"forks:       {counts_text(check.forks)}",
        f"not trained: {check.untrained} calls, such as for a title",
    ]
    if check.unknown_fields == "ignore":
        found.append('needs:       server.unknown_fields = "ignore"')
    if check.failure is not None:
        found.append(f"failed:      {check.failure}")
    elif not check.speaks:
        said = [line for line in check.output.splitlines() if line.strip()][-10:]
        found += [f"the file {FILE} was not written; the program said:", *(f"  {line[:200]}" for line in said)]
    return found


def counts_text(counts: Mapping[str, int]) -> str:
    """Return counts in a line."""
    return ", ".join(f"{name} ({count})" for name, count in sorted(counts.items())) or "none"
