"""A shell in a sandbox: SmolLM2-135M learns to answer questions about files, and to change one, with commands.

    python recipes/terminal.py [--steps 6] [--seed 0] [--resume] [--model SmolLM2-135M-Instruct]

Needs bubblewrap: `palestra environments` says what is missing. Each reply is one line, `run COMMAND` or
`finish ANSWER`. So small a model writes commands that no shell knows, so that it is held to a few dozen: three commands
with any word of the task, and answers that it has read. Which command, which word and when to finish is what it learns;
a worked example of each kind of task stands in front of every task. What a run prints is in README.md.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

import palestra
from palestra import (
    Agent,
    Chat,
    ChatMessage,
    JobConfig,
    Observation,
    PolicyHandle,
    RolloutSpec,
    catalog_entry,
    text_message,
)
from palestra_screens import TerminalEnvironment

KINDS = ("count", "find", "edit")  # YOURS 1: of the tasks that `palestra environments terminal` describes
SYSTEM = "You solve tasks in a shell. Reply with one line: run and a command, or finish and the answer."
# How each kind is done, in turns of the environment and of the agent.
SHOWN = """\
How many lines of events.log begin with TRACE? Finish with the number.
run grep -c ^TRACE events.log
31
finish 31
Exactly one file below notes/ has the word walnut. Finish with its path, such as notes/a/b.txt.
run grep -rl walnut notes
notes/oak/elm7.txt
finish notes/oak/elm7.txt
Set walnut to 1934 in settings.ini and change nothing else. Then finish with the answer done.
run sed -i 's/^walnut = .*/walnut = 1934/' settings.ini
done
finish done
"""
EXAMPLES = [text_message("assistant" if turn % 2 else "user", said) for turn, said in enumerate(SHOWN.splitlines())]


class ShownHow(Agent):
    """Says what the model says, which is shown the examples after the system message."""

    async def step(self, observation: Observation, policy: PolicyHandle) -> tuple[list[Chat], ChatMessage]:
        """Call the model once; its reply is the action."""
        system, *conversation = (*policy.history, *observation.content)
        allowed = possible(conversation[0].text, conversation[-1].text)
        chat = await policy.chat((system, *EXAMPLES, *conversation), choices=allowed, max_tokens=80)
        return [chat], chat.reply


def possible(task: str, read: str) -> list[str]:
    """Return what the model may reply to what it has read last. YOURS 2."""
    words = dict.fromkeys(re.findall(r"[A-Za-z]{3,}", task))
    commands = [f"grep -c ^{word} events.log" for word in words] + [f"grep -rl {word} notes" for word in words]
    for number in re.findall(r"[0-9]+", task):
        commands += [f"sed -i 's/^{word} = .*/{word} = {number}/' settings.ini" for word in words]
    answers = dict.fromkeys(["done", *read.split()[:20]])
    return [f"run {command}" for command in commands] + [f"finish {answer}" for answer in answers]


def tasks(split: Any, count: int, seed: int) -> list[dict[str, Any]]:
    """Draw so many tasks of each kind; what is drawn for validation is in no training task."""
    drawn = catalog_entry("terminal").generate(split, 10 * count, seed)
    return [task for kind in KINDS for task in [one for one in drawn if one["kind"] == kind][:count]]


def job(seed: int, steps: int, model: str) -> JobConfig:
    """Return what is trained, and how; everything else is a default."""
    optimizer = {"learning_rate": 3e-5, "schedule": "linear"}
    return JobConfig.model_validate(
        {
            "name": "terminal",
            "seed": seed,
            "steps": steps,
            "policies": {"policy": {"model": model, "max_context": 1536, "optimizer": optimizer}},
            "rollout": {"groups_per_step": 6, "group_size": 8},
            "evaluation": {"every_steps": 2},
            "checkpoint": {"every_steps": 2},
        }
    )


def demonstrate(
    steps: int = 6, seed: int = 0, resume: bool = False, model: str = "SmolLM2-135M-Instruct"
) -> palestra.TrainResult:
    """Train, and score greedily on tasks that are held out: sixteen of each kind."""
    play = RolloutSpec(
        environment=lambda: TerminalEnvironment(actions="text", max_steps=3),
        agents={"agent": ShownHow()},
        system=SYSTEM,
    )
    config = job(seed, steps, model)
    return palestra.train(
        play,
        tasks("train", 64, seed),
        config,
        validation_tasks=tasks("validation", 16, 0),
        concurrency=8,
        resume=resume,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A model learns to use a shell.")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on with the newest run")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")  # YOURS 3: the model
    arguments = parser.parse_args()
    demonstrate(arguments.steps, arguments.seed, arguments.resume, arguments.model)
