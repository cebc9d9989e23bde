"""The worker of a seat as users write one, in a process of its own: it plays a side of `gomoku-duel`.

    python seat_process.py URL LOG NAME ROLE [--stop-after claim|chat|act [--stop-at N]]

For each observation it calls the model once, and moves to a free place that the reply decides. Every accepted thing is
one line of JSON in LOG, written after the server has answered. With `--stop-after` the process stops itself at the N-th
time, as if by SIGSTOP from outside, until it is killed.
"""

from __future__ import annotations

import argparse
import hashlib
import signal
from itertools import count
from pathlib import Path
from typing import Any

import openai
from worker_process import RETRIES, Log

from palestra import Client


def move_of(board: str, reply: str) -> str:
    """Return one of the free places of a 3 x 3 board, which the reply decides."""
    rows = board.splitlines()[-3:]
    free = [(row + 1, column + 1) for row in range(3) for column in range(3) if rows[row][column] == "."]
    row, column = free[int.from_bytes(hashlib.sha256(reply.encode()).digest()[:4], "little") % len(free)]
    return f"{row} {column}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("log", type=Path)
    parser.add_argument("name")
    parser.add_argument("role")
    parser.add_argument("--stop-after", choices=["claim", "chat", "act"])
    parser.add_argument("--stop-at", type=int, default=1)
    options = parser.parse_args()
    log, passes = Log(options.log, options.name), count(1)

    def did(what: str, **data: Any) -> None:
        log.write(what, **data)
        if what == options.stop_after and next(passes) == options.stop_at:
            log.write("stops", **data)
            signal.raise_signal(signal.SIGSTOP)

    with (
        Client(options.url, worker_id=options.name) as client,
        openai.OpenAI(base_url=options.url, api_key="set for each seat", max_retries=RETRIES) as ai,
    ):
        while True:
            with client.seat(options.role) as seat:
                if seat is None:
                    return
                episode = seat.episode.episode_id
                did("claim", episode=episode, history=len(seat.history.get(options.role, ())))
                model = ai.with_options(base_url=seat.policy.base_url, api_key=seat.policy.api_key)
                for observation in seat:
                    asked: Any = [{"role": "user", "content": message.text} for message in observation.content]
                    answer = model.chat.completions.create(model=seat.policy.model, messages=asked)
                    did("chat", episode=episode, id=answer.id)
                    board = observation.content[-1].text
                    if seat.act(move_of(board, answer.choices[0].message.content or "")):
                        did("act", episode=episode, step=observation.step)
            if seat.lost:  # the episode is played again, or another worker has the seat
                log.write("lost", episode=episode)
                continue
            told = [(event.kind, event.role) for event in seat.events]
            end = "ended" if options.role == "agent" else "ended beside"
            log.write(end, episode=episode, reward=seat.reward, events=told)


if __name__ == "__main__":
    main()
