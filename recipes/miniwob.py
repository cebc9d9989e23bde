"""Web pages in a browser: SmolLM2-135M learns to do what a page asks for (MiniWoB++).

    python recipes/miniwob.py [--steps 16] [--seed 0] [--resume] [--model SmolLM2-135M-Instruct]

Needs Chromium, playwright and MiniWoB's pages: `palestra environments` says what is missing. One model learns five
pages together. It reads the task and the page's controls, and replies with one line such as `click 3`, held to what the
page allows: a click, an option of a list, or, in a field, a text that the task quotes. Each problem comes from a seed,
and the seeds that are held out are in no training task. What it learns is in docs/learning.md.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

import palestra
from palestra import Agent, Chat, ChatMessage, JobConfig, MiniWoB, Observation, PolicyHandle, RolloutSpec, text_message

# YOURS 1: pages of MiniWoB; `palestra environments miniwob/click-button` shows one
PAGES = ("click-button", "click-link", "enter-text", "choose-list", "focus-text")
SYSTEM = "You see a task and the controls of a web page. Reply with the next action."
CONTROL = re.compile(r"^\[(\d+)\] (.*)$", re.MULTILINE)
HELD_OUT = 1_000_000_000  # the first seed that is held out


class PageAgent(Agent):
    """Reads the task and the controls of a page, and says what to do next; text around the controls is left out."""

    async def step(self, observation: Observation, policy: PolicyHandle) -> tuple[list[Chat], ChatMessage]:
        """Call the model once; its reply, which is one of the possible actions, is the action."""
        system, first, *others = (*policy.history, *observation.content)
        task, _, page = first.text.partition("\n\n")
        shown = [text_message("user", f"{task}\n{controls(page)}")]
        for message in others:
            shown.append(text_message("user", controls(message.text)) if message.role == "user" else message)
        possible = actions(task, observation.content[-1].text)
        chat = await policy.chat((system, *shown), choices=possible)
        return [chat], chat.reply


def controls(page: str) -> str:
    """Return the lines of a page that have a number, which are its controls."""
    return "\n".join(f"[{number}] {control}" for number, control in CONTROL.findall(page))


def actions(task: str, page: str) -> tuple[str, ...]:
    """Return all that can be done on a page."""  # YOURS 2: what an agent may do
    found = []
    for number, control in CONTROL.findall(page):
        kind, _, rest = control.partition(" ")
        if kind == "choice":
            found += [f"select {number} {option.removeprefix('*')}" for option in rest.split(" | ")]
        else:
            found.append(f"click {number}")
        if kind == "textbox":
            found += [f"type {number} {text}" for text in re.findall(r'"(.+?)"', task)]
    return tuple(dict.fromkeys(found))


def problems(first: int, count: int) -> list[dict[str, Any]]:
    """Return tasks with the seeds from `first` on, of each page in turn."""
    chosen = [(PAGES[seed % len(PAGES)], seed) for seed in range(first, first + count)]
    return [{"id": f"{page}-{seed}", "page": page, "seed": seed} for page, seed in chosen]


def job(seed: int, steps: int, model: str) -> JobConfig:
    """Return what is trained, and how; everything else is a default."""
    optimizer = {"learning_rate": 5e-5, "schedule": "linear"}
    return JobConfig.model_validate(
        {
            "name": "miniwob",
            "seed": seed,
            "steps": steps,
            "policies": {"policy": {"model": model, "max_context": 1024, "optimizer": optimizer}},
            "rollout": {"groups_per_step": 6, "group_size": 8},
            "evaluation": {"every_steps": 8},
            "checkpoint": {"every_steps": 4},
        }
    )


def demonstrate(
    steps: int = 16, seed: int = 0, resume: bool = False, model: str = "SmolLM2-135M-Instruct"
) -> palestra.TrainResult:
    """Train, and score greedily on seeds that are held out: ten problems of each page."""
    play = RolloutSpec(
        environment=lambda: MiniWoB(actions="text", max_steps=3, timeout_seconds=60.0),
        agents={"agent": PageAgent()},
        system=SYSTEM,
    )
    config, held_out = job(seed, steps, model), problems(HELD_OUT, 10 * len(PAGES))
    # Another seed trains on other problems, too.
    tasks = problems(100_000 * seed, config.rollout.groups_per_step * steps)
    return palestra.train(play, tasks, config, validation_tasks=held_out, concurrency=16, resume=resume)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A model learns to do what web pages ask for.")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on with the newest run")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")  # YOURS 3: the model
    arguments = parser.parse_args()
    demonstrate(arguments.steps, arguments.seed, arguments.resume, arguments.model)
