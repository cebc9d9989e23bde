"""Seconds and memory of one layer's attention over a tree of rows: by compiled kernels, by branches, and by one mask.

python bench/tree_attention.py --threads 2             # trees of 1,000 to 16,000 nodes
python bench/tree_attention.py --only "long prompt"

`runs` is what a trainer does where kernels are compiled, `branches` what it does by torch's attention, and `mask` one
call with a mask of all nodes squared. Beside them, by compiled kernels as well, the same number of computed tokens as
one `row`, as `rows` as long as the tree's, which share nothing, and all rows of the tree in full, `unshared`. Pairs are
those of a token and one that it sees, itself included. All are forward and backward in bfloat16, with the heads of
SmolLM2-135M, in turns; medians. Each figure of memory is the largest resident set of a
process of its own, less what the process had before.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from palestra.models.device import tune_malloc
from palestra.models.kernels import Kernels
from palestra.tokens import TokenRun
from palestra.trainer import tree_attention
from palestra.trainer.packing import Tree
from palestra.trainer.tree_attention import TreeAttention

HEADS, KEY_HEADS, WIDTH = 9, 3, 64
WAYS = ("runs", "branches", "mask", "row", "rows", "unshared")
FLAT = WAYS[3:]


@dataclass(frozen=True, slots=True)
class Shape:
    """Groups of replies to prompts that begin alike."""

    common: int  # tokens that all rows begin with
    prompts: int
    prompt: int  # tokens of a prompt behind the common ones
    replies: int  # to each prompt
    reply: int  # tokens

    @property
    def lengths(self) -> list[int]:
        """Return the tokens of each row."""
        return [self.common + self.prompt + self.reply] * (self.prompts * self.replies)

    def tree(self) -> Tree:
        """Return the rows as a tree, each token with an id of its own."""
        tree, used = Tree(), 0

        def new(count: int) -> list[int]:
            nonlocal used
            used += count
            return list(range(used - count, used))

        common = new(self.common)
        for _ in range(self.prompts):
            prompt = common + new(self.prompt)
            for _ in range(self.replies):
                row = TokenRun(np.array(prompt + new(self.reply), np.int32))
                tree.add(row, tree.shared(row))
        return tree


SHAPES = {
    "short replies": Shape(10, 8, 30, 8, 12),
    "replies of 60": Shape(10, 8, 60, 8, 60),
    "one prompt of 500": Shape(500, 1, 1, 8, 200),
    "replies of 200": Shape(20, 8, 180, 8, 200),
    "long prompt": Shape(8192, 1, 1, 8, 1024),
}


def flat_lengths(shape: Shape, tokens: int, way: str) -> list[int]:
    """Return the tokens of each row that shares nothing, where the tree has so many."""
    if way == "unshared":
        return shape.lengths
    longest = tokens if way == "row" else shape.lengths[0]
    return [min(longest, tokens - start) for start in range(0, tokens, longest)]


def pairs(shape: Shape, way: str) -> int:
    """Return how many pairs of tokens attention computes."""
    tree = shape.tree()
    if way not in FLAT:
        return sum(position + 1 for position in tree.positions)
    return sum(length * (length + 1) // 2 for length in flat_lengths(shape, len(tree), way))


def attention(shape: Shape, way: str) -> tuple[int, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Return how many tokens are computed, and what computes their attention."""
    tree = shape.tree()
    trees = [tree]
    if way in FLAT:
        trees = []
        for length in flat_lengths(shape, len(tree), way):
            trees.append(Tree())
            row = TokenRun(np.arange(length, dtype=np.int32))
            trees[-1].add(row, trees[-1].shared(row))
    scale = WIDTH**-0.5
    if way == "mask":
        mask = tree.mask()
        return len(tree), lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )[0].transpose(0, 1)
    if way == "branches":
        tree_attention.kernels = Kernels
    attend = TreeAttention(trees, torch.device("cpu"))
    return sum(map(len, trees)), lambda q, k, v: attend(0, q, k, v, scale)


def seconds(shape: Shape, way: str, repeats: int) -> tuple[int, list[float], int]:
    """Return the tokens, the seconds of each forward and backward pass, and the bytes that the passes added."""
    tokens, attend = attention(shape, way)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn((1, heads, tokens, WIDTH), generator=draw).bfloat16().requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    upstream = torch.randn((tokens, HEADS, WIDTH), generator=draw).bfloat16()
    before, found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        torch.autograd.grad(attend(query, key, value), (query, key, value), upstream)
        found.append(time.perf_counter() - begin)
    return tokens, found[1:], (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2, help="processes of each kind, in turns")
    parser.add_argument("--only", choices=SHAPES, help="one tree; without it, all")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.way is not None:
        tune_malloc()
        torch.set_num_threads(wanted.threads)
        print(json.dumps(seconds(SHAPES[wanted.only], wanted.way, wanted.repeats)))
        return
    columns = [" | ".join(f"{unit}: {way}" if way == WAYS[0] else way for way in WAYS) for unit in ("ms", "MiB")]
    head = ("tree", "tokens", *columns)
    print(f"| {' | '.join(head)} |\n" + "|---" * (2 + 2 * len(WAYS)) + "|")
    shares: list[str] = []
    for name in SHAPES if wanted.only is None else (wanted.only,):
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        memory: dict[str, float] = {}
        tokens: dict[str, int] = {}
        for _ in range(wanted.rounds):
            for way in WAYS:
                words = [sys.executable, __file__, "--way", way, "--only", name]
                words += ["--threads", str(wanted.threads), "--repeats", str(wanted.repeats)]
                tokens[way], taken, grown = json.loads(subprocess.check_output(words))
                times[way] += taken
                memory[way] = grown / 2**20
        medians = {way: statistics.median(times[way]) for way in WAYS}
        print(
            f"| {name} | {tokens['runs']:,} | " + " | ".join(f"{1e3 * medians[way]:.1f}" for way in WAYS),
            " | ".join(f"{memory[way]:.0f}" for way in WAYS) + " |",
            sep=" | ",
            flush=True,
        )
        for what, counts in (("token", tokens), ("pair", {way: pairs(SHAPES[name], way) for way in WAYS})):
            each = {way: 1e9 * medians[way] / counts[way] for way in ("runs", *FLAT)}
            beside = " | ".join(f"{each['runs'] / each[way]:.2f}" for way in FLAT)
            shares.append(
                f"| {name} | {what} | " + " | ".join(f"{one:,.1f}" for one in each.values()) + f" | {beside} |"
            )
    beside = " | ".join(f"runs beside {way}" for way in FLAT)
    print(
        f"\n| tree | of a | nanoseconds: runs | {' | '.join(FLAT)} | {beside} |\n" + "|---" * (3 + 2 * len(FLAT)) + "|"
    )
    print("\n".join(shares))


if __name__ == "__main__":
    main()
