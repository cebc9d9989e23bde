"""Milliseconds of passes on a CPU, with kernels that this machine compiles and with torch's operators.

python bench/compiled_kernels.py --threads 2

SmolLM2-135M-Instruct in bfloat16 with packed matrices, without a scheduler and without sampling: decoding passes of 1,
8 and 64 replies behind 50 tokens, and the pass of a prompt of 1,024. Then a trainer's pass, forward and backward, of
float32 weights in bfloat16 over 8 x 8 replies to prompts that begin alike, without the output layer. Both ways compute
each pass in turns; medians of all rounds. Beside the engine's passes their products alone, both ways as well.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from unittest.mock import patch

import torch
from tree_attention import SHAPES

from palestra.engine.embedded.kv_cache import DecodeAttention, KVCache, PrefillAttention
from palestra.models.catalog import model_folder
from palestra.models.causal_lm import CausalLM, load_causal_lm
from palestra.models.device import tune_malloc
from palestra.trainer.token_forward import flat_inputs
from palestra_cpu import extension, llama_layers
from palestra_cpu import packed as packed_matrix
from palestra_cpu.cpu_kernels import cpu_kernels
from palestra_cpu.packed import pack_model

ROWS, PROMPT, LENGTH = (1, 8, 64), 1024, 50
PASSES = 5  # of each way in a round
Pass = Callable[[], object]


def decoding(model: CausalLM, rows: int) -> Pass:
    """A pass that computes the next token of some replies, always of the same ones."""
    cache = KVCache(model.layers, model.key_heads, model.head_dim, torch.bfloat16, model.device)
    for _ in range(rows):
        cache.insert(torch.randn((model.layers, 2, model.key_heads, LENGTH, model.head_dim)).to(torch.bfloat16))
    ids, positions, buckets = torch.arange(rows) + 1000, torch.full((rows,), LENGTH), cache.in_order()
    return lambda: model.logits(model.hidden(ids, positions, DecodeAttention.of(buckets)))


def prompting(model: CausalLM) -> Pass:
    """The pass of a prompt, and the scores of its next token."""
    ids, positions = torch.arange(PROMPT) + 1000, torch.arange(PROMPT)
    shape = (model.layers, 2, model.key_heads, PROMPT, model.head_dim)

    def compute() -> object:
        attention = PrefillAttention([(torch.empty(shape, dtype=torch.bfloat16), 0, PROMPT)])
        return model.logits(model.hidden(ids, positions, attention)[-1:])

    return compute


def training(model: CausalLM) -> Pass:
    """The gradients of all layers, from a sum of the hidden states of a tree of rows."""
    tree = SHAPES["short replies"].tree()
    ids, positions, attention = flat_inputs([tree], model.device)

    def compute() -> object:
        model.model.zero_grad()
        return model.hidden(ids, positions, attention).sum().backward()  # type: ignore[no-untyped-call]

    return compute


def products(model: CausalLM, rows: int, scored: int) -> Pass:
    """All products of a pass and nothing else."""
    matrices = list(model.packed or ())
    given = [torch.zeros((rows, one.width), dtype=torch.bfloat16) for one in matrices]
    given[-1] = given[-1][:scored]  # of the head
    return lambda: [one.whole_product(rows) for one, rows in zip(matrices, given, strict=True)]


def seconds(one: Pass) -> list[float]:
    """Time of each of some passes; the first is not counted."""
    found = []
    for _ in range(PASSES + 1):
        begin = time.perf_counter()
        one()
        found.append(time.perf_counter() - begin)
    return found[1:]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    wanted = parser.parse_args()
    tune_malloc()
    torch.set_num_threads(wanted.threads)
    if cpu_kernels() is None:
        parser.error("this machine can't compile kernels: there is nothing to compare")
    with torch.inference_mode():
        model = load_causal_lm(model_folder("SmolLM2-135M-Instruct"), torch.bfloat16)
        pack_model(model)
        works = {f"{rows} replies": (decoding(model, rows), products(model, rows, rows)) for rows in ROWS}
        works[f"a prompt of {PROMPT:,}"] = prompting(model), products(model, PROMPT, 1)
        print("| pass, ms | torch's operators | compiled kernels | ratio | products: oneDNN's | ours |")
        print("|---|--:|--:|--:|--:|--:|")
        for name, (compute, bare) in works.items():
            print_row(name, wanted.rounds, compute, bare)
    trained = load_causal_lm(model_folder("SmolLM2-135M-Instruct"), torch.float32)
    trained.compute_in(torch.bfloat16)
    print_row("a trainer's, forward and backward", wanted.rounds, training(trained), None)


def print_row(name: str, rounds: int, compute: Pass, bare: Pass | None) -> None:
    """Measure a pass both ways, and its products alone where they are given."""
    passes = [compute] if bare is None else [compute, bare]
    compiled, plain = ([list[float]() for _ in passes] for _ in range(2))
    for _ in range(rounds):
        for one, found in zip(passes, compiled, strict=True):
            found += seconds(one)
        with ExitStack() as without:
            for user in (llama_layers, extension, packed_matrix):
                without.enter_context(patch.object(user, "cpu_kernels", lambda: None))
            without.enter_context(patch.object(extension, "attention_kernels", lambda *_: None))
            for one, found in zip(passes, plain, strict=True):
                found += seconds(one)
    (before, *theirs), (now, *ours) = ([1000 * statistics.median(each) for each in way] for way in (plain, compiled))
    products = f"{theirs[0]:.1f} | {ours[0]:.1f}" if bare else " | "
    print(f"| {name} | {before:.1f} | {now:.1f} | {now / before:.2f} | {products} |", flush=True)


if __name__ == "__main__":
    main()
