"""`HarnessRollout`: a rollout function that makes a workspace, runs a harness in it, and scores what it left."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import tarfile
import time
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
from pydantic import ValidationError

from palestra.client import ModelEndpoint, RolloutResult
from palestra.errors import ConfigError, EpisodeForfeited, InvalidRequest, RolloutFailed
from palestra.http_clients import async_http_client
from palestra.process.child import ending
from palestra.sandbox import SandboxSpec, sandbox_provider
from palestra.threads import call, in_thread
from palestra.types.wire import EpisodeCalls
from palestra_harness.boxed import run_in_box
from palestra_harness.folders import temporary_folder
from palestra_harness.harness import Harness, HarnessResult, Score
from palestra_harness.running import RunLimits, run_harness, write_files

CALLS_SECONDS = 30.0  # for the server to count an episode's calls, at the end; it may be starting again
RETRY_SECONDS = 1.0
_OWN_ENDS = ("timeout", "output", "workspace", "left_process")  # of a program; the model may be their reason
BOX_BYTES = 64 * 2**20  # of a program's output in a box, and of the workspace that comes out of it


class HarnessRollout:
    """Plays episodes with a harness, as `palestra.train(harness=…)` and `palestra worker --harness` do.

    A task has `prompt`, a text, and may have `files`: texts by their path in the workspace.
    """

    def __init__(
        self,
        harness: Harness,
        score: Score,
        *,
        folder: Path | str | None = None,
        timeout_seconds: float = 600.0,
        max_calls: int | None = None,
        max_tokens: int | None = None,
        forfeit_reward: float = 0.0,
        box: SandboxSpec | None = None,
    ) -> None:
        """Prepare to play.

        Args:
            harness: the program.
            score: returns the reward of a task and what the program left; None leaves the episode out of training. A
                coroutine function, or called in a thread.
            folder: copied into each workspace, such as a repository; an archive is unpacked. The task's files come on
                top. None: empty.
            timeout_seconds: an episode whose program runs longer is forfeited.
            max_calls: answered model calls at which the program is ended, and what it left is scored, as truncated.
                It is looked at every second. None: any number.
            max_tokens: the same for sampled tokens of the episode.
            forfeit_reward: of an episode whose program breaks its box, runs too long or writes too much after the
                model has replied; if a score was less, the least of them. Set the least that `score` can return.
            box: a box of each episode, in which the program runs; its workspace and its endpoint are added. None: it
                is not isolated.

        Raises:
            ConfigError: the program is not installed, there is no such folder or archive, or no such box can be had.
        """
        if box is None:
            harness.find_program()
        else:
            sandbox_provider(box)
        self.harness, self._box = harness, box
        self._score, self._timeout, self._least = score, timeout_seconds, forfeit_reward
        self._max_calls, self._max_tokens = max_calls, max_tokens
        self._folder = None if folder is None else Path(folder)
        if self._folder is not None and not self._folder.exists():
            raise ConfigError(f"{self._folder}: there is no such folder or archive")

    async def __call__(self, task: dict[str, Any], endpoint: ModelEndpoint) -> RolloutResult:
        """Play one episode.

        Raises:
            InvalidRequest: the task has no prompt, or a file outside of the workspace.
            EpisodeForfeited: after a reply of the model, the program broke its box, ran too long or wrote too much.
            RolloutFailed: it did so without a reply, or has not called the model.
        """
        prompt, files = task.get("prompt"), task.get("files", {})
        if not isinstance(prompt, str) or not prompt:
            raise InvalidRequest("a task of a harness has a `prompt`, which is a text", "prompt")
        if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
            raise InvalidRequest("`files` of a task are texts by their path", "files")
        async with temporary_folder("episode-") as made, async_http_client(timeout=CALLS_SECONDS) as http:
            workspace = made / "workspace"  # the same last part in each episode: paths stand in prompts
            await in_thread(lambda: self._fill(workspace, files))
            try:
                result = await self._run(http, endpoint, prompt, workspace)
            except (EpisodeForfeited, RolloutFailed) as error:
                if isinstance(error, RolloutFailed) and error.termination not in _OWN_ENDS:
                    raise
                if not (await _calls_after(http, endpoint, str(error))).answered:  # so no reply can be the reason
                    raise RolloutFailed("agent_failed", f"{error}; the model had not replied") from error
                raise EpisodeForfeited(str(error), self._least) from error
            how = f"{self.harness.name} {ending(result.exit_code)}: {_last_words(result.output)}"
            calls = await _calls_after(http, endpoint, how)
            if not calls.answered and not calls.refused:
                raise RolloutFailed("agent_failed", f"{how}; it has not called the model")
            result = replace(result, answer=calls.answer or "", refused=calls.refused)
            reward = await call(partial(self._score, task, result), "palestra-score")
            paid = reward.values() if isinstance(reward, Mapping) else (reward or 0.0,)
            self._least = min(self._least, sum(min(float(value), 0.0) for value in paid))
            about = {"harness": self.harness.name, "exit_code": result.exit_code, "output": result.output[-2000:]}
            return RolloutResult(reward=reward, metadata=about, truncated=result.truncated)

    async def _run(
        self, http: httpx2.AsyncClient, endpoint: ModelEndpoint, prompt: str, workspace: Path
    ) -> HarnessResult:
        """Run the program in a workspace, in a box if there is one."""
        limited = self._max_calls is not None or self._max_tokens is not None
        reached = partial(self._reached, http, endpoint) if limited else None
        if self._box is None:
            return await run_harness(
                self.harness, endpoint, prompt, workspace, timeout_seconds=self._timeout, reached=reached
            )
        limits = RunLimits(self._timeout, BOX_BYTES, reached)
        return await run_in_box(self.harness, endpoint, prompt, workspace, self._box, limits)

    async def _reached(self, http: httpx2.AsyncClient, endpoint: ModelEndpoint) -> bool:
        """Return whether an episode has used up its calls or tokens; not while its server can't be asked."""
        try:
            calls = await _ask(http, endpoint)
        except httpx2.HTTPError as error:
            if _may_come_back(error):
                return False
            raise RolloutFailed("agent_failed", f"the calls of the episode are unknown: {error}") from error
        too_many = self._max_calls is not None and calls.answered >= self._max_calls
        return too_many or (self._max_tokens is not None and calls.sampled_tokens >= self._max_tokens)

    def _fill(self, workspace: Path, files: Mapping[str, str]) -> None:
        if self._folder is None:
            workspace.mkdir()
        elif self._folder.is_dir():
            shutil.copytree(self._folder, workspace, symlinks=True, ignore=_no_files)
        else:
            workspace.mkdir()
            try:
                _unpack(self._folder, workspace)
            except (shutil.ReadError, tarfile.TarError, zipfile.BadZipFile) as error:
                raise ConfigError(f"{self._folder} can't be unpacked: {error}") from error
        write_files(workspace, files)


async def episode_calls(http: httpx2.AsyncClient, endpoint: ModelEndpoint) -> EpisodeCalls:
    """Return an episode's calls at its end.

    Raises:
        RolloutFailed: the server does not answer, so that nothing is known of them.
    """
    until = time.monotonic() + CALLS_SECONDS
    while True:
        try:
            return await _ask(http, endpoint)
        except (httpx2.HTTPError, ValidationError) as error:
            if not _may_come_back(error) or time.monotonic() + RETRY_SECONDS > until:
                raise RolloutFailed("agent_failed", f"the calls of the episode are unknown: {error}") from error
        await asyncio.sleep(RETRY_SECONDS)


async def _calls_after(http: httpx2.AsyncClient, endpoint: ModelEndpoint, how: str) -> EpisodeCalls:
    """Return an episode's calls, with how its program ended in the error."""
    try:
        return await episode_calls(http, endpoint)
    except RolloutFailed as error:
        raise RolloutFailed(error.termination, f"{how}; {error}") from error


def _may_come_back(error: Exception) -> bool:
    """Return whether a server that has not answered may answer later: it is starting again, perhaps."""
    answered = isinstance(error, httpx2.HTTPStatusError) and error.response.status_code < 500
    return isinstance(error, httpx2.HTTPError) and not answered


async def _ask(http: httpx2.AsyncClient, endpoint: ModelEndpoint) -> EpisodeCalls:
    headers = {"authorization": f"Bearer {endpoint.api_key}"}
    answer = await http.get(f"{endpoint.anthropic_url}/episode_calls", headers=headers)
    return EpisodeCalls.model_validate_json(answer.raise_for_status().content)


def _last_words(output: str) -> str:
    """Return the last line of a program's output."""
    lines = output.split("\n")
    return next((line.strip()[-300:] for line in reversed(lines) if line.strip()), "it said nothing")


def _unpack(archive: Path, workspace: Path) -> None:
    """Unpack an archive; what would lie outside of the workspace is an error, or left out of a zip file."""
    if tarfile.is_tarfile(archive):
        with tarfile.open(archive) as opened:
            opened.extractall(workspace, filter="data")
    else:
        shutil.unpack_archive(archive, workspace)


def _no_files(folder: str, names: list[str]) -> list[str]:
    """Return the sockets, pipes and devices of a folder, which can't be copied."""
    modes = {name: os.lstat(os.path.join(folder, name)).st_mode for name in names}
    return [
        name for name, mode in modes.items() if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))
    ]
