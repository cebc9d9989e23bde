"""Seats: two scripts, as of two people, each play one side of every episode; the server has the environment.

    python recipes/negotiation_seats.py [--steps 2] [--model tiny-random]

A job is started, and two workers: Ada plays with Palestra's client and the OpenAI SDK, Bob with nothing but HTTP. Each
has a key of its own seat alone, and is answered by the policy of its role: that of the first is trained, the other not.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ENVIRONMENT, ROLES = "negotiation", ("first", "second")  # YOURS 1: the environment, and its two agents


def ada(url: str, role: str) -> None:
    """Play a seat with Palestra's client and the OpenAI SDK."""
    import openai

    from palestra import Client

    with Client(url) as client:  # the key is in PALESTRA_API_KEY
        while True:
            with client.seat(role) as seat:
                if seat is None:  # the job is over
                    return
                ai = openai.OpenAI(base_url=seat.policy.base_url, api_key=seat.policy.api_key)
                messages: list[Any] = []
                for observation in seat:
                    messages += [{"role": message.role, "content": message.text} for message in observation.content]
                    held = {"structured_outputs": {"choice": observation.choices}}  # YOURS 2: here and below; {}: free
                    reply = ai.chat.completions.create(model="any name", messages=messages, extra_body=held)
                    text = reply.choices[0].message.content or ""
                    messages.append({"role": "assistant", "content": text})
                    seat.act(text)


def bob(url: str, role: str) -> None:
    """Play a seat with HTTP alone; `docs/how-to/multi-agent.md` has the routes."""

    def post(path: str, key: str, **body: Any) -> dict[str, Any]:
        asked = urllib.request.Request(url + path, json.dumps(body).encode(), {"authorization": f"Bearer {key}"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return dict(json.load(answer))

    mine, who = os.environ["PALESTRA_API_KEY"], {"worker_id": "bob", "role": role, "wait_seconds": 20}
    while (claimed := post("/claim_episode", mine, request_id=os.urandom(8).hex(), **who))["status"] != "finished":
        if claimed["status"] == "waiting":
            continue
        episode, key = claimed["episode"]["episode_id"], claimed["episode"]["api_key"]
        messages: list[dict[str, str]] = []
        try:
            while (seen := post("/observe_seat", key, episode_id=episode, wait_seconds=20))["status"] != "over":
                if seen["status"] == "act":
                    for said in seen["observation"]["content"]:
                        text = "".join(part["text"] for part in said["content"])
                        messages.append({"role": said["role"], "content": text})
                    held = {"structured_outputs": {"choice": seen["observation"]["choices"]}}
                    reply = post("/v1/chat/completions", key, model="any name", messages=messages, **held)
                    text = reply["choices"][0]["message"]["content"]
                    messages.append({"role": "assistant", "content": text})
                    act = {"episode_id": episode, "observation_id": seen["observation"]["observation_id"]}
                    post("/act_seat", key, **act, content=text)
        except urllib.error.HTTPError as error:
            # The seat is lost, because Ada is gone or this worker was too slow, or its episode has ended; claim again.
            if error.code != 409 or json.load(error)["error"]["code"] not in ("episode_lease_expired", "episode_ended"):
                raise


def demonstrate(steps: int, model: str) -> None:
    """Start the job and both workers, and say what each side has earned."""
    import palestra

    folder = Path("runs").absolute() / f"seats-{time.strftime('%H%M%S')}"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    policy = {"model": model, "max_context": 512, "sampling": {"max_tokens": 16}}
    settings = {  # YOURS 3: the job
        "run_dir": folder,
        "steps": steps,
        "server": {"port": port},
        "environment": {"name": ENVIRONMENT, "validation_tasks": 0},
        "policies": {"learner": policy, "rival": policy | {"frozen": True}},
        "roles": dict(zip(ROLES, ("learner", "rival"), strict=True)),
        "seats": {"roles": list(ROLES), "takeover": "worker"},
        "rollout": {"groups_per_step": 2, "group_size": 4},
    }
    folder.mkdir(parents=True)
    job, command = folder / "job.toml", str(Path(sys.executable).with_name("palestra"))
    job.write_text(palestra.dump_config(palestra.JobConfig.model_validate(settings)))
    server = subprocess.Popen([command, "run", str(job)])
    while server.poll() is None and not (folder / "api_key").exists():
        time.sleep(0.1)
    workers = []
    for name, role in zip(("ada", "bob"), ROLES, strict=True):
        key = subprocess.check_output([command, "seat-key", str(folder), role], text=True).strip()
        me = [sys.executable, __file__, "--play", name, role, f"http://127.0.0.1:{port}"]
        workers.append(subprocess.Popen(me, env=os.environ | {"PALESTRA_API_KEY": key}))
    codes = [process.wait() for process in (server, *workers)]
    earned = [game.rewards or {} for game in palestra.read_episodes(folder, "train")]
    for role in ROLES:
        print(f"{role}: {sum(one[role] for one in earned) / len(earned):.2f} a game, of {len(earned)} games")
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Two processes play the seats of the same episodes.")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--model", default="tiny-random")
    parser.add_argument("--play", nargs=3, metavar=("WHO", "ROLE", "URL"), help="be one of the workers")
    arguments = parser.parse_args()
    if arguments.play:
        {"ada": ada, "bob": bob}[arguments.play[0]](arguments.play[2], arguments.play[1])
    else:
        demonstrate(arguments.steps, arguments.model)
