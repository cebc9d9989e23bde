"""Environment `terminal`: small tasks in a shell, in a temporary sandbox without network."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from palestra.envs.acting import DONE, ActingEnvironment, Actions, Progress
from palestra.envs.tasks import final_answers
from palestra.errors import EnvironmentFailed, EpisodeForfeited, InvalidEnvironment, InvalidRequest
from palestra.sandbox import SandboxLimits, SandboxSpec, sandbox
from palestra.tools import tool
from palestra_sandboxes.bubblewrap.program import ProgramLimits, check_bubblewrap
from palestra_screens.terminal.shell import MAX_COMMAND, Shell, start_shell

Files = Mapping[str, bytes]
_CHECKED = SandboxSpec(limits=SandboxLimits(processes=64, disk_mib=64, seconds=20.0, output_bytes=100_000))
# The function is called in a program of our own, which knows arguments and no expected values.
_CALL = """import importlib, json, sys
sys.path.insert(0, ".")
module, function, arguments = json.loads(sys.argv[1])
called = getattr(importlib.import_module(module), function)
print(json.dumps([called(*pair) for pair in arguments]))
"""


async def check(task: Mapping[str, Any], files: Files, answer: str) -> float:
    """Return 1.0 if a task is solved, else 0.0. `files` are those of the home folder after the end of all processes."""
    kind = task.get("kind")
    if not isinstance(kind, str) or kind not in CHECKERS:
        raise InvalidEnvironment(f"a task has the kind {kind!r}; known are {', '.join(CHECKERS)}")
    return float(await CHECKERS[kind](task["expected"], files, answer))


async def _same_answer(expected: str, files: Files, answer: str) -> bool:
    return final_answers(answer, 1)[0].removeprefix("./") == expected


async def _same_files(expected: Mapping[str, str], files: Files, answer: str) -> bool:
    return all(files.get(path) == text.encode() for path, text in expected.items())


async def _committed(expected: Mapping[str, str], files: Files, answer: str) -> bool:
    """Return whether a branch has a file, asked of git in a new sandbox with a copy of the repository."""
    branch, file = expected["branch"], expected["file"]
    shown = await _printed(["git", "show", f"refs/heads/{branch}:{file}"], files)
    return shown.decode(errors="replace").strip() == expected["text"].strip()


async def _right_values(expected: Mapping[str, Any], files: Files, answer: str) -> bool:
    """Return whether a function gives the right values, called in a new sandbox with a copy of the files."""
    asked = json.dumps([expected["module"], expected["function"], expected["arguments"]])
    printed = await _printed(["python3", "-I", "-c", _CALL, asked], files)
    try:
        return bool(json.loads(printed) == expected["values"])
    except (ValueError, RecursionError):
        return False


async def _printed(command: Sequence[str], files: Files) -> bytes:
    """Return a program's output in a new sandbox with a copy of the files; empty if these do not fit into one."""
    try:
        async with sandbox(_CHECKED, "bubblewrap") as box:
            await box.put(files, box.workdir)
            return (await box.run(command)).output
    except (InvalidRequest, EpisodeForfeited):
        return b""


CHECKERS: Mapping[str, Callable[[Any, Files, str], Awaitable[bool]]] = {
    "find": _same_answer,
    "count": _same_answer,
    "edit": _same_files,
    "git": _committed,
    "fix": _right_values,
}


MAX_SECONDS = 60.0  # of one command


class TerminalEnvironment(ActingEnvironment):
    """A task in a shell: the agent runs commands, and finishes with an answer.

    Each episode has its own sandbox. All processes are killed before the task is scored, from the remaining files and
    the answer: 1 if the task is solved, else 0.
    """

    def __init__(
        self,
        *,
        actions: Actions = "tools",
        max_steps: int = 10,
        command_seconds: float = 10.0,
        memory_mib: int = 512,
        disk_mib: int = 64,
        processes: int = 64,
    ) -> None:
        """Create the environment; each episode gets a sandbox.

        Args:
            actions: `tools`, tool calls; `text`, one line such as `run ls`, which small models write more easily.
            max_steps: limit of the agent's replies in an episode.
            command_seconds: how long the agent waits for a command, which then continues in the background.
            memory_mib: limit of all processes together, in MiB.
            disk_mib: size of the home folder in MiB; it is in memory.
            processes: limit of concurrent processes.

        Raises:
            ConfigError: bubblewrap, or a program that the tasks need, is not installed.
            ValueError: a number makes no sense.
        """
        check_bubblewrap()
        if not 0 < command_seconds <= MAX_SECONDS or min(memory_mib, disk_mib, processes) < 8:
            raise ValueError(
                f"command_seconds is above 0 and at most {MAX_SECONDS:g}; memory_mib, disk_mib and processes at least 8"
            )
        # Waiting for the end of the terminal's output takes a second at most.
        super().__init__(
            [tool(self.run), tool(self.keys)], actions=actions, max_steps=max_steps, tool_seconds=command_seconds + 10
        )
        self._seconds = command_seconds
        self._limits = ProgramLimits(memory_mib=memory_mib, disk_mib=disk_mib, processes=processes)
        self._task: Mapping[str, Any] = {}
        self._shell: Shell | None = None

    async def run(self, command: Annotated[str, Field(max_length=MAX_COMMAND)]) -> str:
        """Run a command in the shell.

        Args:
            command: The command, for bash.
        """
        return await self._opened().run(command, self._seconds) or DONE

    async def keys(self, keys: Annotated[str, Field(max_length=1000)]) -> str:
        """Send keys to the program that is still running.

        Args:
            keys: A key's name, such as Enter, C-c or Up, or text.
        """
        return await self._opened().keys(keys, 1.0) or DONE

    async def start(self, task: Mapping[str, Any]) -> str:
        """Start a shell with the task's files, and return the agent's instructions."""
        await self.close()
        self._task = task
        files = {path: text.encode() for path, text in task["files"].items()}
        self._shell = shell = await start_shell(files, self._limits)
        if task["begin"] and (said := await shell.run(task["begin"], MAX_SECONDS)):
            raise EnvironmentFailed(f"the task's first command failed: {said}")
        return str(task["prompt"])

    async def observe(self) -> str:
        """Return "": the results of the commands are enough."""
        return ""

    async def progress(self, answer: str | None) -> Progress:
        """Score the task once the agent has answered."""
        return Progress() if answer is None else Progress(reward=await self._score(answer), over=True)

    async def cut_off(self) -> float:
        """Score the task as it is, without an answer."""
        return await self._score("")

    def check_alive(self) -> None:
        """Check that the sandbox was not ended from outside.

        Raises:
            EnvironmentFailed: bubblewrap was killed.
        """
        self._opened().check_alive()

    async def close(self) -> None:
        """Kill running processes, and remove the sandbox."""
        if (shell := self._shell) is not None:
            self._shell = None
            await shell.close()

    async def _score(self, answer: str) -> float:
        shell = self._opened()
        await shell.end()
        return await check(self._task, await shell.sandbox.read_files(), answer)

    def _opened(self) -> Shell:
        if self._shell is None:
            raise EnvironmentFailed("there is no terminal: the episode has not begun")
        return self._shell
