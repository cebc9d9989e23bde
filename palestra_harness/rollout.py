"""`HarnessRollout`: a rollout function that makes a workspace, runs a harness in it, and scores what it left."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from palestra.client import ModelEndpoint, RolloutResult
from palestra.errors import ConfigError, InvalidRequest
from palestra.threads import call, in_thread
from palestra_harness.harness import Harness, HarnessResult
from palestra_harness.running import run_harness, write_files

Scored = float | Mapping[str, float] | None
Score = Callable[[dict[str, Any], HarnessResult], Scored | Awaitable[Scored]]


class HarnessRollout:
    """Plays episodes with a harness: `palestra.train(rollout=HarnessRollout(…))`, or by name with `palestra worker`.

    A task has `prompt`, a text, and may have `files`: texts by their path in the workspace.
    """

    def __init__(
        self,
        harness: Harness,
        score: Score,
        *,
        folder: Path | str | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        """Prepare to play.

        Args:
            harness: the program.
            score: returns the reward of a task and what the program left; None leaves the episode out of training. A
                coroutine function, or called in a thread.
            folder: copied into each workspace, such as a repository; an archive is unpacked. The task's files come on
                top. None: empty.
            timeout_seconds: an episode whose program runs longer fails.

        Raises:
            ConfigError: there is no such folder or archive.
        """
        self.harness = harness
        self._score, self._timeout = score, timeout_seconds
        self._folder = None if folder is None else Path(folder)
        if self._folder is not None and not self._folder.exists():
            raise ConfigError(f"{self._folder}: there is no such folder or archive")

    async def __call__(self, task: dict[str, Any], endpoint: ModelEndpoint) -> RolloutResult:
        """Play one episode.

        Raises:
            InvalidRequest: the task has no prompt, or a file outside of the workspace.
            RolloutFailed: the program ran too long, or wrote too much.
        """
        prompt, files = task.get("prompt"), task.get("files", {})
        if not isinstance(prompt, str) or not prompt:
            raise InvalidRequest("a task of a harness has a `prompt`, which is a text", "prompt")
        if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
            raise InvalidRequest("`files` of a task are texts by their path", "files")
        with TemporaryDirectory(prefix="palestra-workspace-") as made:
            workspace = Path(made) / "workspace"  # the same last part in each episode: paths stand in prompts
            await in_thread(lambda: self._fill(workspace, files))
            result = await run_harness(self.harness, endpoint, prompt, workspace, timeout_seconds=self._timeout)
            reward = await call(partial(self._score, task, result), "palestra-score")
            about = {"harness": self.harness.name, "exit_code": result.exit_code, "output": result.output[-2000:]}
            return RolloutResult(reward=reward, metadata=about)

    def _fill(self, workspace: Path, files: Mapping[str, str]) -> None:
        if self._folder is None:
            workspace.mkdir()
        elif self._folder.is_dir():
            shutil.copytree(self._folder, workspace, symlinks=True)
        else:
            workspace.mkdir()
            shutil.unpack_archive(self._folder, workspace, filter="data")
        write_files(workspace, files)
