"""Harbor plays: its agents, environments, compose files and steps, in an environment of its own with Python 3.12.

    python3.12 -m venv harbor-env && harbor-env/bin/pip install harbor==0.25.0
    PALESTRA_HARBOR_PYTHON=harbor-env/bin/python python recipes/harbor_agents.py --folder tasks/ --environment docker

Harbor can't be installed beside Palestra. So a child, this file run by that Python, plays the trials: it reads a line
of JSON for each, and answers with its rewards. `environment = {name = "harbor"}` plays plain tasks without this.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any


def agent_of(endpoint: Any) -> dict[str, Any]:
    """Return the agent of a trial, as Harbor's configuration has it; this one needs tmux in the task's image."""
    settings = {
        "api_base": endpoint.base_url,
        "model_info": {"max_input_tokens": 4000, "max_output_tokens": 128},
        "max_turns": 4,
        "llm_call_kwargs": {"max_tokens": 128},
        "record_terminal_session": False,  # would install asciinema
    }
    named = {"name": "terminus-2", "model_name": f"openai/{endpoint.model}", "kwargs": settings}  # YOURS 1: the agent
    return named | {"env": {"OPENAI_API_KEY": endpoint.api_key}}


class Trials:
    """The child, and the trials that it plays."""

    def __init__(self, environment: str) -> None:
        """Prepare; the child starts with the first trial. `environment`: a type of Harbor's, or `module:Class`."""
        self._environment = {"import_path" if ":" in environment else "type": environment}
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._child: asyncio.Task[asyncio.subprocess.Process] | None = None

    async def play(self, path: str, agent: dict[str, Any]) -> dict[str, Any]:
        """Play a trial of the task in a folder, and return its `rewards`, or its `error`."""
        if self._child is None:
            self._child = asyncio.create_task(self._start())
        name, child = os.urandom(8).hex(), await self._child
        config = {"task": {"path": path}, "trials_dir": "trials", "agent": agent, "environment": self._environment}
        self._waiting[name] = answer = asyncio.get_running_loop().create_future()
        child.stdin.write(json.dumps({"id": name, "config": config}).encode() + b"\n")
        return await answer

    async def _start(self) -> asyncio.subprocess.Process:
        python, pipe = os.environ["PALESTRA_HARBOR_PYTHON"], asyncio.subprocess.PIPE
        variables = os.environ | {"HARBOR_TELEMETRY": "0"}
        child = await asyncio.create_subprocess_exec(
            python, __file__, "--child", env=variables, stdin=pipe, stdout=pipe
        )
        self._reading = asyncio.create_task(self._read(child))
        return child

    async def _read(self, child: asyncio.subprocess.Process) -> None:
        async for line in child.stdout:
            found = json.loads(line)
            if not (answer := self._waiting.pop(found["id"])).done():  # its episode may have been cancelled
                answer.set_result(found)
        self._child, ended, self._waiting = None, self._waiting, {}  # the next trial starts another
        for answer in ended.values():
            if not answer.done():
                answer.set_exception(RuntimeError("Harbor's process has ended"))  # gives the episode back


def child() -> None:
    """Play the trials whose configurations are the lines of standard input, at the same time."""
    from harbor.models.trial.config import TrialConfig  # type: ignore[import-not-found]
    from harbor.trial.trial import Trial  # type: ignore[import-not-found]

    answers, sys.stdout = sys.stdout, sys.stderr  # Harbor prints

    async def play(asked: dict[str, Any]) -> None:
        rewards, error = None, None
        try:
            result = await (await Trial.create(TrialConfig.model_validate(asked["config"]))).run()
            rewards = result.verifier_result and result.verifier_result.rewards
            error = result.exception_info and result.exception_info.exception_type
        except Exception as raised:  # noqa: BLE001 - the parent gives the episode back
            error = f"{type(raised).__name__}: {raised}"
        print(json.dumps({"id": asked["id"], "rewards": rewards, "error": error}), file=answers, flush=True)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            while line := await asyncio.to_thread(sys.stdin.readline):
                group.create_task(play(json.loads(line)))

    asyncio.run(main())


def demonstrate(folder: Path, steps: int, model: str, environment: str) -> None:
    """Train on the tasks of a folder, two trials at the same time."""
    import palestra

    trials = Trials(environment)

    async def rollout(task: dict[str, Any], endpoint: Any) -> float:
        found = await trials.play(task["path"], agent_of(endpoint))
        if not found["rewards"]:
            raise RuntimeError(f"no rewards: {found['error']}")  # gives the episode back
        return float(found["rewards"]["reward"])  # YOURS 2: what the verifier's rewards are worth

    tasks = [{"path": str(path.parent)} for path in sorted(folder.resolve().glob("*/task.toml"))]  # YOURS 3: the tasks
    settings = {"name": "harbor-agents", "steps": steps, "policies": {"policy": {"model": model, "max_context": 4096}}}
    config = palestra.JobConfig.model_validate(settings | {"rollout": {"groups_per_step": 1, "group_size": 2}})
    result = palestra.train(rollout, tasks, config, concurrency=2)
    print(f"{len(list(palestra.read_episodes(result.run_dir, 'train')))} episodes were trials of Harbor")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Episodes that are trials of Harbor.")
    parser.add_argument("--folder", type=Path, default=Path("tasks"))
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--environment", default="docker")
    parser.add_argument("--child", action="store_true", help="be the child")
    given = parser.parse_args()
    child() if given.child else demonstrate(given.folder, given.steps, given.model, given.environment)
