"""A user's script around `palestra.train` or `palestra.evaluate`, which signals itself in the middle of an episode.

    python stoppable_script.py FOLDER train|play plain|loop|thread SIGINT|SIGTERM|none [--resume]

It says RAN ON where the call returns, as a script would that pushes its model somewhere next.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading

import openai

import palestra
from palestra import JobConfig
from palestra.envs import Environment

FOLDER, WHAT, WHERE, SIGNAL = sys.argv[1:5]
TASKS = [{"text": f"task {number}"} for number in range(4)]


def config() -> JobConfig:
    return JobConfig.model_validate(
        {
            "run_dir": FOLDER,
            "steps": 3,
            "deterministic": True,
            "rollout": {"group_size": 2, "groups_per_step": 2},
            "engine": {"kind": "fake", "reply_tokens": 6},
            "checkpoint": {"every_steps": 100},
        }
    )


sent: list[str] = []


def interrupt() -> None:
    """Once: a second signal ends the script without saving."""
    if SIGNAL != "none" and not sent:
        sent.append(SIGNAL)
        os.kill(os.getpid(), signal.Signals[SIGNAL])


async def rollout(task, policy) -> float:
    async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
        messages = [{"role": "user", "content": task["text"]}]
        reply = (await client.chat.completions.create(model=policy.model, messages=messages)).choices[0].message.content
    if policy.version.endswith(".1"):  # one step is trained
        interrupt()
        await asyncio.sleep(1000)
    return float(len(reply))


class Slow(Environment):
    blocking = False

    def reset(self, task):
        interrupt()
        return task["text"], {}

    def step(self, action):
        return "", 1.0, True, False, {}


def work() -> None:
    if WHAT == "train":
        palestra.train(rollout, TASKS, config(), resume="--resume" in sys.argv)
    else:
        palestra.evaluate(environment=Slow, tasks=TASKS, config=config())
    print("RAN ON", flush=True)


async def in_a_loop() -> None:
    work()


if __name__ == "__main__":
    # A shell that runs tests in its background has them ignore SIGINT, and every process that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if WHERE == "loop":
        asyncio.run(in_a_loop())
    elif WHERE == "thread":
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            # The kernel may hand a signal to another thread, which does not wake the main one from a wait without end.
            while thread.is_alive():
                thread.join(0.1)
        except KeyboardInterrupt:
            print("the main thread was interrupted", flush=True)
            raise
    else:
        work()
