"""A harness with one tool: SmolLM2-135M learns to write shell scripts that Harbor's verifiers accept.

    python recipes/harness_tool.py [--steps 8] [--seed 0] [--model SmolLM2-135M-Instruct]

`agent` below is a program that knows a base URL, a key and a model's name. Palestra starts it for each episode in a
workspace of its own, and scores the script that it left there with the verifier of the task, in containers: five tasks
ship, each with inputs that the verifier draws. The tool's schema holds so small a model to six scripts. Which of them
solves a task is what it learns. Needs podman and busybox-static. What a run prints is in README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

SCRIPTS = (  # YOURS 1: what the model may write
    "printf %d $(($1 + $2))",
    "name=$1; echo Hello, $name!",
    "grep -c error",
    "tr a-z A-Z",
    "test $1 -gt $2 && echo $1 || echo $2",
    "wc -l",
)
SYSTEM = "You write shell scripts."


def agent(task: str) -> None:
    """Let the model write the script, in one call of the tool."""
    line = {"type": "object", "properties": {"line": {"enum": SCRIPTS}}, "required": ["line"]}
    tool = {"type": "function", "function": {"name": "write_run_sh", "parameters": line}}
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
    body = {"model": os.environ["MODEL"], "messages": messages, "tools": [tool], "tool_choice": "required"}
    body |= {"parallel_tool_calls": False, "max_tokens": 96}
    headers = {"authorization": f"Bearer {os.environ['KEY']}", "content-type": "application/json"}
    request = urllib.request.Request(os.environ["URL"] + "/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        calls = json.load(answer)["choices"][0]["message"].get("tool_calls") or []
    for call in calls:
        Path("run.sh").write_text(json.loads(call["function"]["arguments"])["line"] + "\n")


async def verified(task: str, script: str) -> float:
    """Return what the verifier of a task pays for a script."""
    from palestra_worlds.harbor import HarborEnvironment
    from palestra_worlds.harbor.catalog import shipped_folder

    environment = HarborEnvironment(shipped_folder())
    try:
        await environment.start({"id": task})
        await environment.shell(f"printf %s {shlex.quote(script)} > /app/run.sh")
        return (await environment.verdict()).total
    finally:
        await environment.close()


verdicts: dict[tuple[str, str], asyncio.Task[float]] = {}  # episodes with the same script share its verdict


async def score(task: dict[str, Any], result: Any) -> float:
    """Score what the program left in its workspace. YOURS 2."""
    import asyncio

    file = result.workspace / "run.sh"
    if not file.is_file():
        return 0.0
    key = task["id"], file.read_text()
    if key not in verdicts or (verdicts[key].done() and verdicts[key].exception()):
        verdicts[key] = asyncio.create_task(verified(*key))
    return await asyncio.shield(verdicts[key])


def tasks() -> list[dict[str, Any]]:
    """Return the tasks that ship; the script to be mended is in its workspace. YOURS 3."""
    from palestra_worlds.harbor.catalog import shipped_folder
    from palestra_worlds.harbor.task import read_tasks, task_data

    found = []
    for name, task in sorted(read_tasks(shipped_folder()).items()):
        given = shipped_folder() / name / "environment" / "run.sh"
        found.append(task_data(task) | {"files": {"run.sh": given.read_text()} if given.is_file() else {}})
    return found


def demonstrate(steps: int = 8, seed: int = 0, model: str = "SmolLM2-135M-Instruct") -> None:
    """Train, and play the same tasks greedily before, between and after."""
    import palestra
    from palestra_harness import Harness

    harness = Harness(
        name="own",
        command=(sys.executable, "-I", "-S", str(Path(__file__).resolve()), "--agent", "{task}"),  # starts quickly
        variables={"URL": "{base_url}", "KEY": "{api_key}", "MODEL": "{model}"},
    )
    optimizer = {"learning_rate": 1e-4, "schedule": "linear"}
    sampling = {"temperature": 1.5}  # so that commands are tried which the untrained model hardly ever writes
    policy = {"model": model, "max_context": 512, "optimizer": optimizer, "sampling": sampling}
    settings = {"name": "harness-tool", "seed": seed, "steps": steps, "policies": {"policy": policy}}
    settings |= {"rollout": {"groups_per_step": 5, "group_size": 8}, "evaluation": {"every_steps": 2}}
    config = palestra.JobConfig.model_validate(settings | {"checkpoint": {"every_steps": steps}})
    palestra.train(
        harness=harness, reward=score, tasks=tasks(), validation_tasks=tasks(), config=config, concurrency=40
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A program with one tool learns to write shell scripts.")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--agent", metavar="TASK", help="be the agent")
    arguments = parser.parse_args()
    if arguments.agent is not None:
        agent(arguments.agent)
    else:
        demonstrate(arguments.steps, arguments.seed, arguments.model)
