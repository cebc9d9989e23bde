"""The least that a piece of work of `engine` takes on this machine; prints one JSON line.

    python bench/engine_floor.py --model FOLDER --threads 2

Replies are made token by token, so there is one pass over the weights for each token of a reply, for all sequences
together. A pass takes at least as long as its multiplications at the measured rate of bf16 products (step_floor.py),
and as long as reading its weights once at the measured rate of reading memory; the longer of the two is its floor.
A prompt that several replies share is computed once, and of a conversation nothing is computed twice. Left out:
attention between positions and its keys and values, norms, softmax, drawing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from engine_work import NEW_TOKENS, PROMPT_TOKENS, WORKS, Work
from step_floor import REPEATS, Weights, best_rate, count_weights, generate_flop, product_rates
from transformers import AutoConfig, AutoModelForCausalLM

WEIGHT_BYTES = 2  # bfloat16
READ_BYTES = 2**29  # more than any cache holds


def read_rate(threads: int) -> float:
    """Bytes a second that a sum over a large tensor reads: the median of a few tries."""
    torch.set_num_threads(threads)
    numbers = torch.ones(READ_BYTES // 4)
    tries = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        numbers.sum()
        tries.append(time.perf_counter() - start)
    return READ_BYTES / statistics.median(tries)


def model_weights(model: str) -> Weights:
    """Of a model's layout; nothing is loaded."""
    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        layout = AutoModelForCausalLM.from_config(config)
    return count_weights(list(layout.named_parameters()), config.vocab_size)


def floor_seconds(work: Work, weights: Weights, product_rate: float, bytes_rate: float) -> float:
    """All passes of a piece of work; for the time to a first token, the one pass that gives it."""
    reading = WEIGHT_BYTES * (weights.body + weights.head) / bytes_rate

    def one_pass(computed: int, predicted: int) -> float:
        return max(generate_flop(weights, computed, predicted) / product_rate, reading)

    if work.probed:  # the others' next tokens and the new prompt
        return one_pass(work.prompts + PROMPT_TOKENS, work.prompts + 1)
    rows = work.prompts * work.samples
    # The last token of a reply is computed only if a next turn follows: with that turn's prompt.
    seconds = one_pass(work.prompts * PROMPT_TOKENS, work.prompts)
    seconds += (work.turns - 1) * one_pass(work.prompts * (PROMPT_TOKENS + 1), work.prompts)
    return seconds + work.turns * (NEW_TOKENS - 1) * one_pass(rows, rows)


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="folder")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    weights, rates = model_weights(arguments.model), product_rates(arguments.threads)
    reading = read_rate(arguments.threads)
    record = {
        "gflops_by_shape": {shape: rate / 1e9 for shape, rate in rates.items()},
        "read_gb_per_second": reading / 1e9,
        "seconds": {name: floor_seconds(work, weights, best_rate(rates), reading) for name, work in WORKS.items()},
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
