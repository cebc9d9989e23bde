"""Environment `harbor`: the agent works on a task of Harbor's format with a shell in its container."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from palestra.envs.acting import DONE, ActingEnvironment, Actions, Progress
from palestra.envs.environment import Info
from palestra.errors import ConfigError, EnvironmentFailed, EpisodeForfeited
from palestra.sandbox import Sandbox
from palestra.threads import in_thread
from palestra.tools import tool
from palestra.types.messages import StepReward
from palestra_worlds.harbor.boxes import (
    BoxRules,
    Spoiled,
    agent_spec,
    in_shell,
    opened,
    run_script,
    shown,
    user_of,
    verifier_spec,
)
from palestra_worlds.harbor.scoring import VerifierResult, verify
from palestra_worlds.harbor.task import HarborTask, find_task, resolved

MAX_COMMAND = 32_000  # characters
MAX_SHOWN = 4_000  # characters of a command's output: its beginning and its end
_AGENT_SECONDS = 3_600.0  # where task.toml has no agent.timeout_sec
_LEAST: dict[str, float] = {}  # by task: the least that a verifier has paid in this process, if below 0


class HarborEnvironment(ActingEnvironment):
    """A task of Harbor's format: the agent runs commands in the task's container, and finishes.

    Each episode has its own box. When the agent has ended, all its processes are ended, and the task's verifier writes
    the rewards. A verifier that writes none after commands of the agent is its loss, because these may be the reason;
    otherwise the episode fails, and is retried without a reward. A forfeit pays 0, or `least_reward` of `[metadata]` in
    task.toml, or the least that the task has paid so far, whichever is less.
    """

    def __init__(
        self,
        folder: Path,
        rules: BoxRules | None = None,
        *,
        actions: Actions = "tools",
        max_steps: int = 20,
        command_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the environment; each episode gets a box.

        Args:
            folder: one task, or a folder of tasks.
            rules: what tasks may have; None: no network and no variables of this machine.
            actions: `tools`, tool calls; `text`, one line such as `shell ls`, which small models write more easily.
            max_steps: limit of the agent's replies in an episode.
            command_seconds: limit of one command, which is then ended.
            clock: seconds, for the time that the agent's commands take.

        Raises:
            ValueError: a number makes no sense.
        """
        if not 0 < command_seconds <= _AGENT_SECONDS:
            raise ValueError(f"command_seconds is above 0 and at most {_AGENT_SECONDS:g}")
        super().__init__([tool(self.shell)], actions=actions, max_steps=max_steps, tool_seconds=command_seconds + 60.0)
        self._folder, self._rules = folder, rules or BoxRules()
        self._seconds, self._clock = command_seconds, clock
        self._stack = AsyncExitStack()  # closes the box
        self._box: Sandbox | None = None
        self._task: HarborTask | None = None
        self._verdict: VerifierResult | None = None
        self._left = 0.0  # seconds of the agent's commands
        self._acted = False  # whether it has run any

    async def shell(self, command: Annotated[str, Field(max_length=MAX_COMMAND)]) -> str:
        """Run a command in the container. Each one starts in the working folder, and has to end by itself.

        Args:
            command: The command, for the shell.
        """
        if self._left <= 0:
            return "(the time for this task is over)"
        if "\0" in command or not command.strip():
            return "(that is no command)"
        seconds, began = min(self._seconds, self._left), self._clock()
        self._acted = True
        text, user = command.encode(errors="replace").decode(), user_of(self._playing().table.agent)
        done = await self._opened().run(in_shell(text), user=user, seconds=seconds)
        self._left -= self._clock() - began
        states = [
            f"(ended after {seconds:g} s)" if done.timed_out else "",
            "(ended: it wrote too much)" if done.cut else "",
            f"(exit code {done.code})" if done.code and not done.timed_out and not done.cut else "",
        ]
        return "\n".join(filter(None, [_cut(shown(done)), *states])) or DONE

    async def start(self, task: Mapping[str, Any]) -> str:
        """Open the task's container, and return its instruction."""
        await self.close()
        try:
            self._task = found = find_task(self._folder, task.get("id"))
            self.forfeit_reward = min(_least_of(found), _LEAST.get(found.name, 0.0))
            spec = agent_spec(found, self._rules)
            verifier_spec(found, self._rules)  # what is not allowed is refused before an episode is played
        except ConfigError as error:
            raise EnvironmentFailed(str(error)) from error
        self._left, self._acted = found.table.agent.timeout_sec or _AGENT_SECONDS, False
        building = opened(found, spec, self._rules, found.table.environment.build_timeout_sec)
        self._box = await self._stack.enter_async_context(building)
        if (user := user_of(found.table.agent)) is not None and (await self._box.run(["true"], user=user)).code:
            raise EnvironmentFailed(f"task {found.name!r}: its image has no user {user!r}, which agent.user names")
        return found.instruction

    async def observe(self) -> str:
        """Return "": the results of the commands are enough."""
        return ""

    async def progress(self, answer: str | None) -> Progress:
        """Verify the task when the agent has finished, or its time is over."""
        over = answer is not None or self._left <= 0
        return Progress(reward=await self._verify(), over=True) if over else Progress()

    async def cut_off(self) -> StepReward:
        """Verify the task as it is."""
        return await self._verify()

    def check_alive(self) -> None:
        """Do nothing: a box that has ended fails the next command."""

    def info(self) -> Info:
        """Return the end of the verifier's output."""
        return {} if self._verdict is None else {"verifier": self._verdict.output}

    async def close(self) -> None:
        """End the box, and remove it."""
        stack, self._stack = self._stack, AsyncExitStack()
        self._box = self._task = self._verdict = None
        await stack.aclose()

    async def solve(self) -> bool:
        """Run the task's own solution in the open box, as Harbor's agent `oracle` does, and return whether there is
        one.

        Raises:
            EnvironmentFailed: it can't be read, or asks for what the job does not allow.
        """
        task, box = self._playing(), self._opened()
        if not task.has_solution:
            return False
        try:
            files = await in_thread(task.solution)
            variables = resolved(task.table.solution.env, self._rules.variables, f"task {task.name!r}: solution.env")
        except ConfigError as error:
            raise EnvironmentFailed(str(error)) from error
        await box.put(files, "/solution")
        variables = {"DEBIAN_FRONTEND": "noninteractive"} | variables
        user = user_of(task.table.agent)
        await box.run(run_script("/solution/solve.sh"), environment=variables, user=user, seconds=self._left)
        return True

    async def verdict(self) -> VerifierResult:
        """Return the verifier's verdict on the open box; afterwards it is of no use to an agent."""
        try:
            self._verdict = await verify(task := self._playing(), self._opened(), self._rules)
        except ConfigError as error:
            raise EnvironmentFailed(str(error)) from error
        lost = sum(min(value, 0.0) for value in self._verdict.rewards.values())
        _LEAST[task.name] = min(_LEAST.get(task.name, 0.0), lost)
        return self._verdict

    async def _verify(self) -> StepReward:
        try:
            return (await self.verdict()).rewards
        except Spoiled as error:
            if self._acted:
                raise EpisodeForfeited(str(error)) from error
            raise

    def _opened(self) -> Sandbox:
        if self._box is None:
            raise EnvironmentFailed("there is no box: the episode has not begun")
        return self._box

    def _playing(self) -> HarborTask:
        if self._task is None:
            raise EnvironmentFailed("there is no task: the episode has not begun")
        return self._task


def _least_of(task: HarborTask) -> float:
    """Return a task's `metadata.least_reward`, if it is below 0. Raises ConfigError: it is no number."""
    least = task.table.metadata.get("least_reward", 0.0)
    if isinstance(least, bool) or not isinstance(least, int | float) or not math.isfinite(least):
        raise ConfigError(f"task {task.name!r}: metadata.least_reward is {least!r}, and has to be a finite number")
    return min(float(least), 0.0)


def _cut(text: str) -> str:
    """Return a text, or its beginning and its end."""
    half = MAX_SHOWN // 2
    return text if len(text) <= MAX_SHOWN else f"{text[:half]}\n… ({len(text):,} characters) …\n{text[-half:]}"
