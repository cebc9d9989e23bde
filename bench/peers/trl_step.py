"""Time GRPO steps of TRL's `GRPOTrainer`, the peer that Palestra's own step is compared with.

One step is: sample 8 prompts x 8 completions (40 prompt tokens, exactly 12 new tokens each, at
temperature 1), score them with seeded random rewards, and make one AdamW update (learning rate
2e-5, no KL term) of float32 weights with forward and backward under bfloat16 autocast. The rewards
are random numbers so that no group has equal rewards and none can be skipped.

The script runs in an environment of its own (see `requirements-trl.txt`), on the CPU and without a
network. It writes one JSON line to stdout; everything else, TRL's own output included, goes to
stderr.

Settings chosen in the peer's favour:

* One generation of all 64 rows per optimizer step, with one update from it, so that TRL needs no
  second forward pass for old logprobs.
* Gradient checkpointing off (TRL's default is on: it would compute the forward pass twice).
* No logging, no checkpoints, no evaluation; TRL's default optimizer, the fused AdamW.
* The 64 rows are trained on `--batch` at a time, of 8 x 8, 16 x 4, 32 x 2 and 64 x 1 (rows per
  backward pass x gradient accumulation). On two CPU cores 8 x 8 had the lowest median with glibc's
  default allocator settings, was level with the others (within noise) under those below, and took
  the least memory: it is the default here.

One setting belongs to the process and not to TRL, so whoever starts both programs gives it to both:
`MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000` keeps glibc from returning each large
tensor to the kernel. Without it TRL's steps took 1.4 to 2 times as long, mostly in page faults.

Left as TRL has them: clipping of the gradient norm at 1, and sampling with transformers'
`generate`. TRL's continuous batching is no alternative here: with bf16 it casts the weights
themselves to bfloat16, and the masters would no longer be float32.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Read by the libraries below when they are imported, so it has to be set before that.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_DATASETS_OFFLINE="1",
    HF_DATASETS_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
)

import torch
import transformers
import trl
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

PROMPTS = 8
SAMPLES = 8
ROWS = PROMPTS * SAMPLES
PROMPT_TOKENS = 40
NEW_TOKENS = 12
LEARNING_RATE = 2e-5
SYSTEM_PROMPT = "You are a calculator. Reply with the number only."
FILLER = " now"
"""A word of one token, repeated before the question until a prompt has `PROMPT_TOKENS`."""
TUNING_VARIABLES = (
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "KMP_BLOCKTIME",
)
"""Environment variables that change a step's time; the record tells which of them were set."""

Message = dict[str, str]


class WrongShape(ValueError):
    """What TRL ran is not the step that this benchmark describes, so its time means nothing."""


def prompt_length(tokenizer: Any, messages: Sequence[Message]) -> int:
    """Count the tokens of `messages` in the chat template, generation prompt included."""
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    return len(encoded["input_ids"])


def build_prompts(tokenizer: Any, count: int, rng: random.Random) -> list[list[Message]]:
    """Make `count` different conversations of exactly `PROMPT_TOKENS` tokens each.

    Raises:
        WrongShape: this tokenizer cannot reach the length by repeating `FILLER`.

    """
    pairs = rng.sample([(a, b) for a in range(1, 100) for b in range(1, 100)], count)
    prompts = []
    for a, b in pairs:
        for repeats in range(PROMPT_TOKENS):
            messages = [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": f"Add{FILLER * repeats}: {a} + {b} ="},
            ]
            length = prompt_length(tokenizer, messages)
            if length >= PROMPT_TOKENS:
                break
        if length != PROMPT_TOKENS:
            raise WrongShape(f"the prompt for {a} + {b} has {length} tokens, not {PROMPT_TOKENS}")
        prompts.append(messages)
    return prompts


class RandomReward:
    """A reward function of seeded uniform numbers that also checks the rows it is given."""

    __name__ = "random_reward"  # GRPOTrainer names its metrics by the function's `__name__`.

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        """Return one reward per row of `completion_ids` (ragged: rows, tokens).

        Raises:
            WrongShape: the batch is not `ROWS` rows of `NEW_TOKENS` tokens.

        """
        lengths = sorted({len(ids) for ids in completion_ids})
        if len(completion_ids) != ROWS or lengths != [NEW_TOKENS]:
            sampled = f"{len(completion_ids)} rows of {lengths} tokens"
            raise WrongShape(f"TRL sampled {sampled}, not {ROWS} rows of [{NEW_TOKENS}]")
        return [self._rng.random() for _ in completion_ids]


class StepClock(TrainerCallback):
    """Measures from the end of one optimizer step to the end of the next, in seconds.

    That interval holds all of a step: the batch, generation, rewards, forward and backward passes,
    clipping and the optimizer.
    """

    def __init__(self) -> None:
        self.step_seconds: list[float] = []
        self._last = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock of the first step."""
        self._last = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Close one step and start the next."""
        now = time.perf_counter()
        self.step_seconds.append(now - self._last)
        self._last = now
        print(f"step {len(self.step_seconds)}: {self.step_seconds[-1]:.2f} s", file=sys.stderr)


def time_generate(model: Any) -> list[float]:
    """Replace `model.generate` by itself with a clock; return the list that its seconds go to."""
    original = model.generate
    seconds: list[float] = []

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        output = original(*args, **kwargs)
        seconds.append(time.perf_counter() - started)
        prompt_tokens = kwargs["input_ids"].shape[1]
        if prompt_tokens != PROMPT_TOKENS:
            raise WrongShape(f"TRL's prompts have {prompt_tokens} tokens, not {PROMPT_TOKENS}")
        return output

    model.generate = timed
    return seconds


def peak_rss_mb() -> float:
    """Largest resident size of this process so far, in MiB (Linux only).

    Not `getrusage`: its `ru_maxrss` survives `exec`, so that a small process started by a large
    one reports the peak of its parent.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def trainer_config(folder: str, steps: int, batch: int, seed: int) -> GRPOConfig:
    """Build the settings of the module's docstring, training on `batch` of `ROWS` at a time."""
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=True,
        seed=seed,
        max_steps=steps,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=ROWS // batch,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        generation_kwargs={"min_new_tokens": NEW_TOKENS},
        temperature=1.0,
        beta=0.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def measure(model_folder: Path, threads: int, steps: int, batch: int, seed: int) -> dict[str, Any]:
    """Train `steps` optimizer steps and return the record that is printed as JSON.

    Args:
        model_folder: a folder that `from_pretrained` loads, weights and tokenizer.
        threads: CPU threads of torch.
        steps: optimizer steps, of which the first is warm-up and not reported.
        batch: rows per forward and backward pass; divides `ROWS`.
        seed: of the prompts, the rewards and the sampling.

    Raises:
        WrongShape: TRL ran something else than the step that was asked for.

    """
    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        model_folder,
        dtype=torch.float32,
        local_files_only=True,
    )
    # Fresh prompts for each step: the dataset then lasts for one epoch, with no restart in between.
    prompts = build_prompts(tokenizer, PROMPTS * steps, random.Random(seed))
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=RandomReward(seed),
            args=trainer_config(folder, steps, batch, seed),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        generate_seconds = time_generate(model)
        trainer.train()

    if len(clock.step_seconds) != steps:
        raise WrongShape(f"TRL made {len(clock.step_seconds)} optimizer steps, not {steps}")
    if torch.get_num_threads() != threads:
        raise WrongShape(f"torch ended with {torch.get_num_threads()} threads, not {threads}")
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if dtypes != {torch.float32}:
        raise WrongShape(f"the master weights are {dtypes}, not float32")

    reported = clock.step_seconds[1:]
    generate_median = None
    if len(generate_seconds) == steps:
        generate_median = round(statistics.median(generate_seconds[1:]), 4)
    return {
        "peer": "trl",
        "version": trl.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": threads,
        "batch": batch,
        "gradient_accumulation": ROWS // batch,
        "environment": {name: os.environ[name] for name in TUNING_VARIABLES if name in os.environ},
        "step_seconds": [round(seconds, 4) for seconds in reported],
        "median_seconds": round(statistics.median(reported), 4),
        "generate_seconds": generate_median,
        "peak_rss_mb": round(peak_rss_mb(), 1),
    }


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with a message when a value makes no sense."""
    parser = argparse.ArgumentParser(description="Time GRPO steps of TRL's GRPOTrainer on the CPU.")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="local model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="the first is dropped")
    parser.add_argument("--batch", type=int, default=8, choices=[8, 16, 32, 64], help="rows per backward pass")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if not arguments.model.is_dir():
        parser.error(f"--model: {arguments.model} is not a folder")
    if arguments.threads < 1:
        parser.error("--threads: at least 1")
    if arguments.steps < 2:
        parser.error("--steps: at least 2, because the first is dropped as warm-up")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its record as one JSON line on stdout."""
    arguments = parse_arguments(argv)
    with contextlib.redirect_stdout(sys.stderr):
        record = measure(
            arguments.model,
            arguments.threads,
            arguments.steps,
            arguments.batch,
            arguments.seed,
        )
    print(json.dumps(record))


if __name__ == "__main__":
    main()
