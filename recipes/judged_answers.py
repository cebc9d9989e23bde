"""Rewards by judgement: a model learns to be polite and short, which no function of the job computes.

    python recipes/judged_answers.py [--steps 12] [--seed 0] [--model tiny-random] [--judge http://127.0.0.1:8000]

A rubric asks two questions about each reply; each is a named reward. Without `--judge` a small server that speaks
OpenAI's protocol stands in for the language model that judges: it errs in one answer of ten. The hidden `gold` (weight
0: measured only) says what a reply is worth. `palestra episodes runs/judged EPISODE` shows verdicts beside a reply.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import palestra
from palestra import JobConfig, ModelAgent, RolloutSpec, TaskEnvironment
from palestra_judges import Criterion, Rubric

POLITE = ("please", "thank", "sorry")
REPLIES = (
    "No.",
    "Done.",
    "Do it yourself.",
    "Thank you, done.",
    "Sorry, not today.",
    "As I have said so many times before, that is not what I am here for, and never was.",
    "Thank you so much for asking me, of all people, for this, which is an honour and a pleasure, as ever.",
    "I might get round to it at some point, or I might not, depending on what else comes up in the meantime.",
)
CRITERIA = [  # YOURS 1: what a good reply is
    Criterion(name="polite", text="Is the reply polite?", weight=2.0),
    Criterion(name="short", text="How long is the reply?", choices=["long", "medium", "short"]),
]


def polite(text: str) -> bool:
    """Return whether a text has a polite word."""
    return any(word in text.lower() for word in POLITE)


def gold(task: dict[str, Any], answer: str) -> dict[str, float]:
    """Return what the reply is worth, which the model is not trained on."""
    return {"gold": float(polite(answer) and len(answer) < 20)}


class StandIn(BaseHTTPRequestHandler):
    """Answers a rubric as a language model would: a JSON object with a choice for each criterion."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Judge the reply in a request."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        asked = re.match(r"<<<DATA (\w+)>>>\n(.*)\n<<<END", body["messages"][1]["content"], re.DOTALL)
        name, text = asked[1], json.loads(asked[2])["reply"]["text"]
        kind = "yes" if polite(text) != (random.random() < 0.1) else "no"
        found = [
            {"name": "polite", "reason": "it has such words, or not", "choice": kind},
            {"name": "short", "reason": f"{len(text)} characters", "choice": "short" if len(text) < 20 else "long"},
        ]
        said = {"choices": [{"message": {"content": json.dumps({"id": name, "criteria": found})}}]}
        answer = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def job(seed: int, steps: int, model: str, judge: str) -> JobConfig:
    """Return what is trained, and who judges; everything else is a default."""
    optimizer = {"learning_rate": 5e-3, "schedule": "linear"}
    return JobConfig.model_validate(
        {
            "name": "judged",
            "seed": seed,
            "steps": steps,
            "policies": {"helper": {"model": model, "max_context": 256, "optimizer": optimizer}},
            "rollout": {"groups_per_step": 2, "group_size": 16},
            "algorithm": {"reward_weights": {"gold": 0.0}},
            "judge": Rubric(url=judge, model="judge", criteria=CRITERIA, max_concurrency=4),  # YOURS 2: who judges
            "engine": {"dtype": "float32", "threads": 1},
            "trainer": {"dtype": "float32", "threads": 1},
        }
    )


def demonstrate(steps: int = 12, seed: int = 0, model: str = "tiny-random", judge: str = "") -> palestra.TrainResult:
    """Train; the curve of `train/rewards/gold` shows whether the judge was followed to the right place."""
    server = None if judge else ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    with server or nullcontext():
        if server is not None:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            judge = f"http://127.0.0.1:{server.server_address[1]}"
        agent = ModelAgent(choices=REPLIES, max_tokens=64)
        play = RolloutSpec(environment=lambda: TaskEnvironment(gold), agents={"agent": agent})
        tasks = [{"id": f"t{n}", "prompt": f"Wish {n}"} for n in range(2 * steps)]  # YOURS 3: the tasks
        done = palestra.train(play, tasks, job(seed, steps, model, judge), validation_tasks=tasks[:4])
        if server is not None:
            server.shutdown()
    print("gold by step:", " ".join(f"{row['train/rewards/gold']:.2f}" for row in done.metrics[1:]))
    return done


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A tiny model learns from a judge.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="tiny-random")
    parser.add_argument("--judge", default="", help="URL of a server, without /v1; without it one that stands in")
    arguments = parser.parse_args()
    demonstrate(arguments.steps, arguments.seed, arguments.model, arguments.judge)
