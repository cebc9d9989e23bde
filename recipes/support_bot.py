"""Live: a support bot learns from its users' feedback, and a gate tests every version before it serves them all.

    python recipes/support_bot.py [--sessions 800] [--seed 0] [--model SmolLM2-135M-Instruct]

`palestra run` serves the bot; simulated users ask it with the OpenAI client. Their satisfaction is a known function of
the reply. Some say it late, twice or never; some do not consent. RUN.png shows it, versions and decisions.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openai
from matplotlib.figure import Figure

from palestra_live.gate.ledger import Decided, replay

LIVE = """
kind = "live"
run_dir = "{run}"
seed = {seed}
checkpoint.every_steps = 10   # the gate tests every tenth version
rollout = {{ groups_per_step = 12, max_staleness = 9 }}
algorithm = {{ name = "live", clip_low = 0.5, clip_high = 0.5 }}
live = {{ idle_seconds = 10.0, wait_seconds = 30.0, gate.canary = 0.5 }}
[policies.bot]
model = "{model}"
adapter.rank = 16
optimizer = {{ learning_rate = 1e-3, warmup_steps = 2 }}
"""
DESK = "Reply to users of a shop: Sorry, please ask billing! Or: Sorry, please ask shipping! Or returns, or security."
ASKED = {  # YOURS 1: what users ask
    "billing": ("My invoice is too high.", "I have paid twice.", "My card was refused."),
    "shipping": ("My parcel is late.", "Where is my parcel?", "The courier lost my box."),
    "returns": ("The shoes are too small.", "The lamp came broken.", "I don't like the jacket."),
    "security": ("I forgot my password.", "A stranger uses my account.", "I can't log in."),
}


def satisfaction(department: str, reply: str) -> float:
    """Return from 0 to 1: 0.4 for the right department and no other, 0.3 for a polite word, 0.3 for few words."""
    words = re.findall(r"[a-z]+", reply.lower())  # YOURS 2: what users like
    named = [each for each in ASKED if each in words]
    polite = any(word in words for word in ("please", "sorry", "thank", "thanks"))
    brief = min(max((22 - len(words)) / 16, 0.0), 1.0) if words else 0.0
    return 0.4 * (department in named) / max(len(named), 1) + 0.3 * polite + 0.3 * brief


async def use(url: str, key: str, sessions: int, seed: int) -> np.ndarray:
    """Let users come, 16 at a time, for a session each; return when it began, its version and its satisfaction."""
    draw, room, found = random.Random(seed), asyncio.Semaphore(16), list[tuple[float, int, float]]()
    bot = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, timeout=300)

    async def visit(number: int) -> None:
        name, department, habit = f"chat-{number}", draw.choice(list(ASKED)), draw.random()
        user: dict[str, Any] = {"id": name, "subject": f"user-{number}", "train": draw.random() < 0.9}
        asked: Any = [{"role": "system", "content": DESK}, {"role": "user", "content": draw.choice(ASKED[department])}]
        async with room:
            began, named = time.time(), {"x-palestra-session": name}
            opened: Any = await bot.post(f"{url}/live/sessions", body=user, cast_to=object)
            reply = await bot.chat.completions.create(model="bot", messages=asked, max_tokens=24, extra_headers=named)
            await asyncio.sleep(1.0)  # reads it
        await asyncio.sleep(12.0 * (habit < 0.1))  # is late: the session is over
        score = satisfaction(department, reply.choices[0].message.content or "")
        found.append((began, int(opened["policy"].rpartition("-")[2]), score))
        if len(found) % 50 == 0:
            print(f"{len(found):5} sessions, satisfaction of 50: {np.mean(found[-50:], axis=0)[2]:.2f}", flush=True)
        for _ in range(user["train"] * ((habit < 0.9) + (habit < 0.2))):  # some none, which is not 0; some twice
            await bot.post(f"{url}/feedback", body={"id": name, "session": name, "score": score}, cast_to=object)

    async with bot:
        await asyncio.gather(*map(visit, range(sessions)))
    return np.array(sorted(found))


def draw_curve(used: np.ndarray, decided: list[Decided], path: Path) -> None:
    """Draw each session in the colour of its version, the mean of 50, and a line where the gate decided."""
    axes, (began, versions, scores) = (figure := Figure((9.0, 5.0), 150, layout="constrained")).subplots(), used.T
    for version in np.unique(versions):
        these = versions == version
        axes.plot(np.nonzero(these)[0], scores[these], ".", ms=4, alpha=0.5, label=f"version {version:.0f}")
    axes.plot([scores[max(0, end - 50) : end].mean() for end in range(1, len(used) + 1)], "k", label="mean of 50")
    for one in decided:
        if (stage := one.decision.after) in ("canary", "live", "rejected", "gone_back"):
            place, line = float(np.searchsorted(began, one.at)), "-" if stage == "live" else ":"
            axes.axvline(place, color="grey", ls=line)
            axes.annotate(f" {one.decision.version} {stage}", (place, 1.02), rotation=45, fontsize=8)
    axes.set(xlabel="session", ylabel="satisfaction", ylim=(0, 1.02))
    axes.legend(loc="upper right", markerscale=3)
    figure.savefig(path)


def demonstrate(sessions: int, seed: int, model: str) -> None:
    """Serve, use, and show what became of it."""
    (run := Path("runs") / f"support-{time.strftime('%H%M%S')}").parent.mkdir(exist_ok=True)
    job, log, picture = (run.with_suffix(ending) for ending in (".toml", ".log", ".png"))
    job.write_text(LIVE.format(seed=seed, run=run.name, model=model))  # YOURS 3: the model
    command = [Path(sys.executable).with_name("palestra"), "run", job]
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as server:
        try:
            while not (url := re.search(r"data plane at (http://[\d.:]+)", log.read_text())):
                assert server.poll() is None, f"the server has ended: {log.read_text()}"
                time.sleep(0.2)
            used = asyncio.run(use(url[1], (run / "live_key").read_text(), sessions, seed))
        finally:
            server.terminate()
    draw_curve(used, replay(run)[1], picture)
    print(f"first 200 sessions: {used[:200, 2].mean():.2f}, last 200: {used[-200:, 2].mean():.2f}; see {picture}")
    print(f"what the gate decided, and why:  palestra live status {run}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A support bot learns from its users.")
    for name, default in {"sessions": 800, "seed": 0, "model": "SmolLM2-135M-Instruct"}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    demonstrate(**vars(parser.parse_args()))
