"""A harness with one tool: SmolLM2-135M learns to write shell scripts that Harbor's verifiers accept.

    python recipes/harness_tool.py [--steps 8] [--seed 0] [--model SmolLM2-135M-Instruct]

`agent` below is a program that knows a base URL, a key and a model's name. Palestra starts it for each episode in a
workspace of its own, and scores the script that it left there with the verifier of the task, in containers: five tasks
ship, each with inputs that the verifier draws. So small a model is held to a few commands by the tool's schema; which
of them solves a task is what it learns. Needs podman and busybox-static. What a run prints is in README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

LINES = (  # YOURS 1: what a script may be
    'echo "Hello, $1!"',
    "echo $(($1 + $2))",
    "grep -c error",
    "tr a-z A-Z",
    "wc -l",
    "sort",
    'echo "$1 $2"',
)
COMMANDS = [*(f"echo '{line}' > run.sh" for line in LINES), "sed -i s/lt/gt/ run.sh", "cat run.sh"]
SYSTEM = "You write shell scripts. You are in the folder /app."


def agent(task: str) -> None:
    """Let the model choose one command, and run it. A larger model would get the output, and go on."""
    command = {"type": "object", "properties": {"command": {"enum": COMMANDS}}, "required": ["command"]}
    shell = {"type": "function", "function": {"name": "shell", "parameters": command}}
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
    body = {"model": os.environ["MODEL"], "messages": messages, "tools": [shell], "tool_choice": "required"}
    headers = {"authorization": f"Bearer {os.environ['KEY']}", "content-type": "application/json"}
    request = urllib.request.Request(os.environ["URL"] + "/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        calls = json.load(answer)["choices"][0]["message"].get("tool_calls") or []
    for call in calls[:1]:
        chosen = json.loads(call["function"]["arguments"])["command"]
        if chosen in COMMANDS:
            subprocess.run(chosen, shell=True, check=False)


@functools.cache
def verified(task: str, script: str) -> float:
    """Return what the verifier of a task pays for a script. Episodes with the same script share it."""

    async def play() -> float:
        from palestra_worlds.harbor import HarborEnvironment
        from palestra_worlds.harbor.catalog import shipped_folder

        environment = HarborEnvironment(shipped_folder())
        try:
            await environment.start({"id": task})
            await environment.shell(f"printf %s {shlex.quote(script)} > /app/run.sh")
            return (await environment.verdict()).total
        finally:
            await environment.close()

    return asyncio.run(play())


def score(task: dict[str, Any], result: Any) -> float:
    """Score what the program left in its workspace. YOURS 2."""
    script = result.workspace / "run.sh"
    return verified(task["id"], script.read_text()) if script.is_file() else 0.0


def tasks() -> list[dict[str, Any]]:
    """Return the tasks that ship; the script to be mended is in its workspace. YOURS 3."""
    from palestra_worlds.harbor.catalog import shipped_folder
    from palestra_worlds.harbor.task import read_tasks, task_data

    found = []
    for name, task in sorted(read_tasks(shipped_folder()).items()):
        given = shipped_folder() / name / "environment" / "run.sh"
        found.append(task_data(task) | {"files": {"run.sh": given.read_text()} if given.is_file() else {}})
    return found


def demonstrate(steps: int, seed: int, model: str) -> None:
    """Train, and score greedily on the same tasks, whose inputs are drawn anew."""
    import palestra
    from palestra_harness import Harness

    harness = Harness(
        name="own",
        command=(sys.executable, str(Path(__file__).resolve()), "--agent", "{task}"),
        variables={"URL": "{base_url}", "KEY": "{api_key}", "MODEL": "{model}"},
    )
    policy = {"model": model, "max_context": 1536, "optimizer": {"learning_rate": 3e-5}}
    settings = {"name": "harness-tool", "seed": seed, "steps": steps, "policies": {"policy": policy}}
    settings |= {"rollout": {"groups_per_step": 5, "group_size": 8}, "evaluation": {"every_steps": 2}}
    config = palestra.JobConfig.model_validate(settings)
    palestra.train(harness=harness, reward=score, tasks=tasks(), validation_tasks=tasks(), config=config, concurrency=8)


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
