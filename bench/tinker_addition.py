"""Sums by a loop of the Tinker SDK over several seeds: `python bench/tinker_addition.py --seeds 0 1 2 3 4`.

The same tasks, prompts, group sizes, adapter and learning rate as `recipes/addition.py --lora`, with advantages and
weights computed in the loop as `grpo` computes them. The server is a process of its own, `palestra tinker`. A seed
whose result is below `--folder` is not repeated. The part `addition-tinker` of docs/learning.md is replaced, with its
picture, and has seconds and memory of the parts `addition` (full weights) and `addition-lora` beside its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import tinker
from learning import PAGE, PATIENT, ROOT, Outcome, Recipe, draw, part, picture, written
from tinker import types

sys.path.insert(0, str(ROOT))
from recipes.addition import SYSTEM, reward, sums

STEPS, GROUPS, SAMPLES, RATE, EVERY = 30, 16, 6, 3e-4, 5
RECIPE = Recipe(
    script="addition",
    variant="tinker",
    run="",
    steps=STEPS,
    heading="Addition by a loop of the Tinker SDK",
    about="""
`bench/tinker_addition.py`: {steps} steps of 16 sums x 6 answers by the unmodified SDK against `palestra tinker`, with
`importance_sampling`, an adapter of rank 16 on all linear layers, and a learning rate that falls from 3e-4 to 0. Tasks,
prompts and held-out sums are those above. Wall seconds are of the whole run, CPU seconds and memory of the server.
""",
    measure="held-out sums answered right",
)


@contextlib.contextmanager
def server(folder: Path) -> Iterator[tuple[str, str, subprocess.Popen[bytes]]]:
    """A Tinker server: its URL, its key, its process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["-m", "palestra.cli.main", "tinker", "SmolLM2-135M-Instruct", "--dir", str(folder), "--port", str(port)]
    process = subprocess.Popen([sys.executable, *words], env=os.environ | PATIENT, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            with contextlib.suppress(urllib.error.URLError):
                urllib.request.urlopen(f"{url}/api/v1/healthz")
                break
            time.sleep(0.2)
        yield url, (folder / "keys" / "default").read_text(), process
    finally:
        process.terminate()


class Loop:
    """One run of the loop, with one seed."""

    def __init__(self, service: Any, seed: int) -> None:
        """Make a model with an adapter; nothing is trained yet.

        Args:
            service: a `tinker.ServiceClient`.
            seed: of the adapter and of the order of tasks.
        """
        self.model = service.create_lora_training_client(
            base_model="SmolLM2-135M-Instruct", rank=16, seed=seed, train_unembed=False
        ).result()
        self.tokenizer = self.model.get_tokenizer()
        self.training, self.validation = sums()
        self.order = random.Random(seed)
        self.seed = seed

    def prompt(self, task: dict[str, Any]) -> list[int]:
        """The ids of the question."""
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{task['a']} + {task['b']} ="}]
        found: list[int] = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return found

    def answers(self, tasks: list[dict[str, Any]], samples: int, params: Any) -> list[tuple[list[Any], list[float]]]:
        """Sample answers under the present weights: for each task the sequences and their rewards."""
        sampler = self.model.save_weights_and_get_sampling_client().result()
        asked = [sampler.sample(types.ModelInput.from_ints(self.prompt(task)), samples, params) for task in tasks]
        found = []
        for task, future in zip(tasks, asked, strict=True):
            sequences = future.result().sequences
            texts = [self.tokenizer.decode(one.tokens, skip_special_tokens=True) for one in sequences]
            ends = [one.stop_reason for one in sequences]
            found.append((sequences, [reward(task, text, end) for text, end in zip(texts, ends, strict=True)]))
        return found

    def validate(self) -> list[float]:
        """The rewards of the held-out sums, answered greedily."""
        greedy = types.SamplingParams(max_tokens=12, temperature=0.0)
        return [rewards[0] for _, rewards in self.answers(self.validation, 1, greedy)]

    def step(self, number: int, batch: list[dict[str, Any]]) -> float:
        """Train one step, and return the mean reward of the sampled answers."""
        params = types.SamplingParams(max_tokens=12, seed=self.seed * 1000 + number)
        played = self.answers(batch, SAMPLES, params)
        data = []
        for task, (sequences, rewards) in zip(batch, played, strict=True):
            if (deviation := pstdev(rewards)) == 0:
                continue
            for one, earned in zip(sequences, rewards, strict=True):
                # The tokens of an answer share its weight, so that long answers weigh as much as short ones.
                weight = (earned - fmean(rewards)) / deviation / len(one.tokens) / (GROUPS * SAMPLES)
                data.append(datum(self.prompt(task), one, weight))
        if data:
            rate = RATE * (1 - (number - 1) / STEPS)
            self.model.forward_backward(data, "importance_sampling")
            # As AdamW of a job: the same decay rates, and the same bound of the gradient.
            self.model.optim_step(
                types.AdamParams(learning_rate=rate, beta1=0.9, beta2=0.999, eps=1e-8, grad_clip_norm=1.0)
            ).result()
        return fmean(reward for _, rewards in played for reward in rewards)


def datum(prompt: list[int], sample: Any, advantage: float) -> Any:
    """What one answer teaches: nothing at the prompt, `advantage` at each of its tokens."""
    ids = prompt + list(sample.tokens)
    before = [0.0] * (len(prompt) - 1)
    columns = {
        "logprobs": ("float32", before + list(sample.logprobs)),
        "advantages": ("float32", before + [advantage] * len(sample.tokens)),
        "target_tokens": ("int64", ids[1:]),
    }
    inputs = {
        name: types.TensorData(data=data, dtype=kind, shape=[len(data)]) for name, (kind, data) in columns.items()
    }
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def play(seed: int, steps: int) -> Outcome:
    """Run the loop once, against a server of its own."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        with server(Path(folder)) as (url, key, process), tinker.ServiceClient(base_url=url, api_key=key) as service:
            loop = Loop(service, seed)
            queue: list[dict[str, Any]] = []
            scored = [loop.validate()]
            rows = [{"step": 0, "validation/reward_mean": fmean(scored[0])}]
            for number in range(1, steps + 1):
                if len(queue) < GROUPS:
                    queue = loop.order.sample(loop.training, len(loop.training))
                batch, queue = queue[:GROUPS], queue[GROUPS:]
                row = {"step": number, "train/reward_mean": loop.step(number, batch)}
                if number % EVERY == 0 or number == steps:
                    scored.append(loop.validate())
                    row["validation/reward_mean"] = fmean(scored[-1])
                rows.append(row)
        _, _, usage = os.wait4(process.pid, 0)
    right = [(float(fmean(each == 1.0 for each in rewards)), 0.0) for rewards in (scored[0], scored[-1])]
    return Outcome(
        seed=seed,
        rows=rows,
        wall_seconds=time.monotonic() - started,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        peak_mib=usage.ru_maxrss / 1024,
        load=os.getloadavg()[0],
        shares=(right[0], right[1]),
    )


def result_of(folder: Path, seed: int, steps: int) -> Outcome:
    """Return the outcome of a seed, which is run if its file is not there."""
    saved = folder / f"seed-{seed}-steps-{steps}.json"
    if not saved.is_file():
        saved.write_text(json.dumps(asdict(play(seed, steps))))
    fields = json.loads(saved.read_text())
    return Outcome(**{**fields, "shares": tuple(tuple(each) for each in fields["shares"])})


def compared(page: str, outcomes: list[Outcome], steps: int) -> str:
    """Return a table of means: full weights and an adapter, as docs/learning.md has them, and this loop."""
    lines = ["| means over the seeds | right at the end | wall s | CPU s | peak MiB |", "|---|---|---|---|---|"]
    for name, title in (("addition", "full weights, a job"), ("addition-lora", "an adapter, a job")):
        section = page.partition(f"<!-- {name} -->")[2].partition(f"<!-- end of {name} -->")[0]
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:1] == "|"]
        if not rows:
            raise SystemExit(f"docs/learning.md has no table of {name}; run `python bench/learning.py {name}` first")
        places = [rows[0].index(column) for column in (f"step {steps}", "wall s", "CPU s", "peak MiB")]
        right, *costs = (fmean(float(row[place]) for row in rows[2:]) for place in places)
        lines.append(f"| {title} | {right:.2f} | {' | '.join(f'{cost:.0f}' for cost in costs)} |")
    ends, walls = [o.validation()[-1][1] for o in outcomes], [o.wall_seconds for o in outcomes]
    cpu, peaks = [o.cpu_seconds for o in outcomes], [o.peak_mib for o in outcomes]
    costs = " | ".join(f"{fmean(values):.0f}" for values in (walls, cpu, peaks))
    lines.append(f"| an adapter, a loop of the SDK | {fmean(ends):.2f} | {costs} |")
    return "\n".join([*lines, "", "The parts above name the machines and the days of the first two rows.", ""])


def main() -> None:
    """Run the seeds that are missing, one after another, and write page and picture."""
    parser = argparse.ArgumentParser(description="Sums by a loop of the Tinker SDK.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--folder", type=Path, default=Path("runs") / "addition-tinker")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for seed in arguments.seeds:
        outcomes.append(result_of(arguments.folder, seed, arguments.steps))
        print(f"seed {seed}: {outcomes[-1].validation()}, {outcomes[-1].wall_seconds:.0f} s", flush=True)
    draw(RECIPE, outcomes, picture(RECIPE))
    text = part(RECIPE, outcomes, arguments.steps).replace(
        f"bench/learning.py {RECIPE.name}", "bench/tinker_addition.py"
    )
    page = PAGE.read_text()
    text += "\n" + compared(page, outcomes, arguments.steps)
    PAGE.write_text(written(page, RECIPE.name, text))


if __name__ == "__main__":
    main()
