"""Web pages in a browser: SmolLM2-135M learns to do what a page asks for (MiniWoB++).

    python recipes/miniwob.py [--steps 10] [--seed 0] [--resume] [--model SmolLM2-135M-Instruct]

Needs Chromium, playwright and MiniWoB's pages: `palestra environments` says what is missing. One model learns five
pages together. It reads the task and the page's controls, and replies with one line such as `click Submit`, held to
what the page allows: a click, an option of a list, or, in a field, a text that the task quotes. Each problem comes from
a seed, and the seeds that are held out are in no training task. What it learns is in docs/learning.md.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

import palestra
from palestra import Agent, Chat, ChatMessage, JobConfig, Observation, PolicyHandle, RolloutSpec, text_message
from palestra_screens import MiniWoB

# YOURS 1: pages of MiniWoB; `palestra environments miniwob/click-button` shows one
PAGES = ("click-button", "click-link", "enter-text", "choose-list", "focus-text")
SYSTEM = "You see a task and the controls of a web page. Reply with the next action."
CONTROL = re.compile(r"^\[(\d+)\] (.*)$", re.MULTILINE)
HELD_OUT = 1_000_000_000  # the first seed that is held out


class PageAgent(Agent):
    """Reads the task and the controls of a page, and says what to do next; text around the controls is left out."""

    async def step(self, observation: Observation, policy: PolicyHandle) -> tuple[list[Chat], ChatMessage]:
        """Call the model once, and return the environment's command for what it says."""
        system, first, *others = (*policy.history, *observation.content)
        task, _, page = first.text.partition("\n\n")
        possible = actions(task, page)
        messages = [system, text_message("user", f"{task}\n{shown(page)}")]
        for message in others:  # in the model's words, which it has read before
            if message.role == "assistant":
                (said,) = (words for words, command in possible.items() if command == message.text)
                messages.append(text_message("assistant", said))
            else:
                possible = actions(task, message.text)
                messages.append(text_message("user", shown(message.text)))
        chat = await policy.chat(messages, choices=tuple(possible))
        return [chat], text_message("assistant", possible[chat.reply.text])


def shown(page: str) -> str:
    """Return the controls of a page, line by line."""
    return "\n".join(control for _, control in CONTROL.findall(page))


def actions(task: str, page: str) -> dict[str, str]:
    """Return all that an agent may do on a page: the model's words, and the command. YOURS 2."""
    found: list[tuple[str, str]] = []
    for number, control in CONTROL.findall(page):
        kind, _, rest = control.partition(" ")
        if kind == "choice":
            options = [option for option in rest.split(" | ") if not option.startswith("*")]
            found += [(f"select {option}", f"select {number} {option}") for option in options]
        elif kind == "textbox":
            texts = [text for text in re.findall(r'"(.+?)"', task) if f'"{text}"' != rest]
            found += [
                ("click textbox", f"click {number}"),
                *((f"type {text}", f"type {number} {text}") for text in texts),
            ]
        else:
            found.append((f"click {rest if kind in ('button', 'link') else control}", f"click {number}"))
    named: dict[str, str] = {}
    for words, command in found:
        copies = sum(words == other for other, _ in found[: found.index((words, command))])
        named[f"{words} {copies + 1}" if copies else words] = command
    return named


def problems(first: int, count: int) -> list[dict[str, Any]]:
    """Return tasks with the seeds from `first` on, of each page in turn."""
    chosen = [(PAGES[seed % len(PAGES)], seed) for seed in range(first, first + count)]
    return [{"id": f"{page}-{seed}", "page": page, "seed": seed} for page, seed in chosen]


def job(seed: int, steps: int, model: str) -> JobConfig:
    """Return what is trained, and how; everything else is a default."""
    optimizer = {"learning_rate": 3e-5, "schedule": "linear"}
    return JobConfig.model_validate(
        {
            "name": "miniwob",
            "seed": seed,
            "steps": steps,
            "policies": {"policy": {"model": model, "max_context": 1024, "optimizer": optimizer}},
            "rollout": {"groups_per_step": 8, "group_size": 6},
            "evaluation": {"every_steps": 5},
            "checkpoint": {"every_steps": 5},
        }
    )


def demonstrate(
    steps: int = 10, seed: int = 0, resume: bool = False, model: str = "SmolLM2-135M-Instruct"
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
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on with the newest run")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")  # YOURS 3: the model
    arguments = parser.parse_args()
    demonstrate(arguments.steps, arguments.seed, arguments.resume, arguments.model)
