"""A black-box agent: a program that knows a base URL, a key and the name of a model, and nothing of Palestra.

    python recipes/black_box_agent.py [--steps 3] [--model SmolLM2-135M-Instruct]

Each episode starts `agent` below as a process of its own. It could be a program in any language, in a container or on
another machine: it reads the two variables that the OpenAI SDK reads, calls the model twice, and prints its answer.
The function `rollout` starts it and judges what it printed. What a run prints is in README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, str(Path(__file__).resolve()), "--agent"]  # YOURS 1: what starts your agent


def agent(question: str, model: str) -> None:
    """Answer, be asked again, and print the second answer: two calls in one conversation."""
    import openai

    ai = openai.OpenAI(max_retries=5)  # OPENAI_BASE_URL, OPENAI_API_KEY
    messages: list[Any] = [{"role": "system", "content": "You are a calculator. Reply with the number only."}]
    answer = ""
    for said in (question, "Sure? Once more, the number only."):
        messages.append({"role": "user", "content": said})
        reply = ai.chat.completions.create(model=model, messages=messages, max_tokens=12)
        answer = reply.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": answer})
    print(answer)


async def rollout(task: dict[str, Any], endpoint: Any) -> float:
    """Run the agent once, and return its reward. An exception gives the episode back; it is never a reward."""
    variables = os.environ | {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": endpoint.api_key}
    process = await asyncio.create_subprocess_exec(
        *COMMAND, task["question"], "--model", endpoint.model, env=variables, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"the agent ended with code {process.returncode}")
    return float(re.findall(r"\d+", printed.decode())[-1:] == [task["answer"]])  # YOURS 2: what its answer is worth


def demonstrate(steps: int, model: str) -> None:
    """Train on sums of one digit; 12 agents run at the same time at most."""
    import palestra

    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    tasks = [{"question": f"{a} + {b} =", "answer": str(a + b)} for a, b in pairs]  # YOURS 3: the tasks
    policy = {"model": model, "max_context": 512, "optimizer": {"learning_rate": 3e-5}}
    settings = {"name": "black-box", "steps": steps, "policies": {"policy": policy}}
    config = palestra.JobConfig.model_validate(settings | {"rollout": {"groups_per_step": 4, "group_size": 6}})
    result = palestra.train(rollout, tasks, config, concurrency=12)
    print(f"{len(list(palestra.read_episodes(result.run_dir, 'train')))} processes were an episode each")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="An agent in a process of its own.")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--agent", metavar="QUESTION", help="be the agent")
    arguments = parser.parse_args()
    if arguments.agent:
        agent(arguments.agent, arguments.model)
    else:
        demonstrate(arguments.steps, arguments.model)
