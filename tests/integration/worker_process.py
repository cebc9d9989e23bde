"""A worker as users write them, in a process of its own: claims, talks to the model twice, hands in a reward.

    python worker_process.py URL LOG NAME [--threads N] [--opponent] [--choices]
        [--stop-after claim|chat|play [--stop-in EPISODE]]

Every accepted thing is one line of JSON in LOG, written after the server has answered. The reward is a function of the
task and the replies alone. With `--stop-after` the process stops itself in its first episode (or the first whose id
starts with EPISODE), as if by SIGSTOP from outside, until somebody kills it or lets it go on. With `--opponent` an
agent of that name answers each reply, and is rewarded with what the first one has missed. With `--choices` each reply
is one of three words.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import openai

from palestra import Client
from palestra.client import Episode
from palestra.errors import Conflict

RETRIES = 30
WORDS = ["yes", "no", "yellow"]


class Log:
    """Lines that are whole, whichever thread wrote them."""

    def __init__(self, path: Path, worker: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._worker = worker

    def write(self, did: str, **data: Any) -> None:
        os.write(self._file, (json.dumps({"did": did, "worker": self._worker, **data}) + "\n").encode())


def reward_of(task: dict[str, Any], replies: list[str]) -> float:
    """Any number in [0, 1) that differs between replies."""
    digest = hashlib.sha256(json.dumps([task, replies]).encode()).digest()
    return int.from_bytes(digest[:4], "little") / 2**32


def converse(
    ai: openai.OpenAI, episode: Episode, log: Log, after_chat: Any, opponent: bool = False, choices: bool = False
) -> list[str]:
    """Two calls, the second of which goes on from the first, and between them the opponent's answer, if any."""
    messages: list[Any] = [{"role": "user", "content": episode.task["text"]}]
    replies: list[str] = []
    model = ai.with_options(base_url=episode.base_url, api_key=episode.api_key)
    held = {"extra_body": {"structured_outputs": {"choice": WORDS}}} if choices else {}
    for question in ("and again", "no more"):
        answer = model.chat.completions.create(model=episode.model, messages=messages, **held)
        log.write("chat", episode=episode.episode_id, id=answer.id)
        after_chat()
        replies.append(answer.choices[0].message.content or "")
        if opponent:
            said = model.chat.completions.create(
                model=episode.model,
                messages=[{"role": "user", "content": replies[-1]}],
                extra_headers=episode.headers(agent="opponent"),
            )
            question = said.choices[0].message.content or question
        messages += [{"role": "assistant", "content": replies[-1]}, {"role": "user", "content": question}]
    return replies


def play_all(client: Client, ai: openai.OpenAI, log: Log, options: argparse.Namespace) -> None:
    places, stop_in = [options.stop_after], options.stop_in

    def stop_if(place: str) -> None:
        if place == places[0] and episode.episode_id.startswith(stop_in):
            places[0] = None
            log.write("stops", episode=episode.episode_id)
            signal.raise_signal(signal.SIGSTOP)  # of this thread, so that it does nothing more

    while (episode := client.begin_episode()) is not None:
        log.write("claimed", episode=episode.episode_id, kind=episode.kind, version=episode.policy.version)
        stop_if("claim")
        try:
            replies = converse(ai, episode, log, lambda: stop_if("chat"), options.opponent, options.choices)
            stop_if("play")
            reward = reward_of(episode.task, replies)
            rewards = {"agent": reward, "opponent": 1.0 - reward} if options.opponent else reward
            client.end_episode(episode, rewards, metadata={"worker": os.getpid()})
        except (Conflict, openai.ConflictError) as error:  # it was given to another worker
            log.write("lost", episode=episode.episode_id, why=str(error))
        else:
            log.write("ended", episode=episode.episode_id, reward=reward)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("log", type=Path)
    parser.add_argument("name")
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--opponent", action="store_true")
    parser.add_argument("--choices", action="store_true")
    parser.add_argument("--stop-after", choices=["claim", "chat", "play"])
    parser.add_argument("--stop-in", default="")
    options = parser.parse_args()
    log = Log(options.log, options.name)
    with (
        Client(options.url, worker_id=options.name) as client,
        openai.OpenAI(base_url=options.url, api_key="set for each episode", max_retries=RETRIES) as ai,
    ):
        threads = [threading.Thread(target=play_all, args=(client, ai, log, options)) for _ in range(options.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
