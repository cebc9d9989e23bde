"""What the barrier between rollouts and updates costs with several policies: `python bench/global_barrier.py`.

Each job plays the same number of model calls a step, shared by 1, 2, 4 or 8 policies of which all weights are trained.
With `max_staleness = 0` no episode is played while policies are trained and published; with 1, episodes of the next
step are played meanwhile, and only the publication of weights holds calls up. A model of 8 layers of
512 with random weights, so that eight of them fit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

POLICIES, ROLES, TOKENS = (1, 2, 4, 8), 8, 12


def main() -> None:
    """Run each job in a process of its own, in turns, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="one round of shorter jobs")
    parser.add_argument("--job", type=int, nargs=2, metavar=("POLICIES", "STALENESS"), help="run one job, print JSON")
    arguments = parser.parse_args()
    steps = 4 if arguments.quick else 6
    if arguments.job is not None:
        print(json.dumps(job(*arguments.job, steps)))
        return
    found: dict[tuple[int, int], list[dict[str, float]]] = {}
    for _ in range(1 if arguments.quick else 3):
        for policies in POLICIES:
            for staleness in (0, 1):
                words = [sys.executable, __file__, "--job", str(policies), str(staleness)]
                words += ["--quick"] if arguments.quick else []
                done = subprocess.run(
                    words, check=True, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
                )
                found.setdefault((policies, staleness), []).extend(json.loads(done.stdout.splitlines()[-1]))
    print("| policies | max_staleness | step s | train s | publish s | standing still | of it publication |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    for (policies, staleness), rows in found.items():
        step, train, publish = (
            statistics.median(row[f"time/{name}_seconds"] for row in rows) for name in ("step", "train", "publish")
        )
        still = publish if staleness else step - statistics.median(row["time/rollout_seconds"] for row in rows)
        print(
            f"| {policies} | {staleness} | {step:.2f} | {train:.2f} | {publish:.3f} | {still / step:.0%} "
            f"| {publish / step:.1%} |"
        )


def job(policies: int, staleness: int, steps: int) -> list[dict[str, float]]:
    """Train with some policies; returns the rows of metrics but the first, which warms up."""
    import palestra

    class Round(palestra.MultiAgentEnvironment):
        """All roles say something once, at the same time."""

        reusable = True
        roles = tuple(f"role-{number}" for number in range(ROLES))

        def begin(self, task: Mapping[str, Any]) -> None:
            """Remember the task."""
            self._task = task

        def protocol(self, task: Mapping[str, Any]) -> palestra.AgentProtocol:
            """Return one barrier."""
            return palestra.simultaneous(rounds=1)

        def view(self, role: str) -> str:
            """Return a prompt of about 40 tokens."""
            return f"{self._task['number']:>36}{role[-1]}"

        def apply(self, actions: Mapping[str, Any]) -> palestra.Outcome:
            """Pay each role for an odd number of characters."""
            return palestra.Outcome(rewards={role: len(a.text) % 2 for role, a in actions.items()}, over=True)

    with TemporaryDirectory() as folder:
        model = medium_model(Path(folder) / "model")
        policy = {"model": model, "max_context": 128, "sampling": {"max_tokens": TOKENS}}
        config = palestra.JobConfig.model_validate(
            {
                "name": "barrier",
                "run_dir": str(Path(folder) / "run"),
                "steps": steps,
                "policies": {f"p{number}": policy for number in range(policies)},
                "roles": {f"role-{number}": f"p{number % policies}" for number in range(ROLES)},
                "rollout": {"groups_per_step": 2, "group_size": 4, "max_staleness": staleness},
                "algorithm": {"credit": "agent"},
                "evaluation": {"every_steps": 0},
                "checkpoint": {"every_steps": steps},
                "engine": {"threads": 1, "max_batch": 64},
                "trainer": {"threads": 1},
            }
        )
        tasks = [{"number": number} for number in range(2 * steps)]
        result = palestra.train(environment=Round, tasks=tasks, config=config, quiet=True)
        return [dict(row) for row in result.metrics[1:] if "time/step_seconds" in row]


def medium_model(folder: Path) -> str:
    """Write a model of random weights with the tokenizer of `tiny-random`, and return its folder."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    import palestra

    tiny = palestra.model_folder("tiny-random")
    config = AutoConfig.from_pretrained(tiny)
    config.update({"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8})
    config.update({"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return str(folder)


if __name__ == "__main__":
    main()
