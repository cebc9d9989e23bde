"""Checks and measures everything that needs a GPU, within ten minutes on one card, and writes a table in Markdown.

python bench/gpu.py                                        writes bench/gpu.md
python bench/gpu.py --vllm .venv-peers/vllm/bin/python     with bare vLLM beside the embedded engine
python bench/gpu.py --cpu --out rehearsal.md               the same code on a CPU and a tiny model: no measurement

Correctness is against the CPU in float32: log-probabilities and gradients of the trainer, ids of the engine without
chance. Then tokens a second of rollout, a training step with its share of what the card can multiply (MFU), the time
that new weights take to the engine, memory, and the largest model of which all weights can be trained.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from figures import Part, show
from processes import HERE, shown
from rich.console import Console

from palestra.config import SMOLLM2, TINY

SECONDS = 600.0  # for everything
CHECKS = "Against the CPU in float32"
ROLLOUT = "Rollout: tokens sampled a second"
STEP = "Training step, all weights, bfloat16 products"
FITS = "Largest model of which all weights can be trained on it (billions of weights)"
# How far apart is right: float32 differs by the order of sums alone, bfloat16 by its roundings.
MOST = {"float32": (1e-3, 1e-3), "bfloat16": (0.3, 0.1)}
LEAST_EQUAL_IDS = 0.95  # where two tokens are about as probable, the order of a sum decides


def child(part: str, options: Sequence[object], seconds: float) -> tuple[str, dict[str, Any] | None, str]:
    """Run one part, and return its command, its result, or why there is none."""
    command = [sys.executable, HERE / "gpu_parts.py", part, *options]
    try:
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=max(seconds, 1.0))
    except subprocess.TimeoutExpired:
        return shown(command), None, f"{part}: stopped after {seconds:.0f} s, so that all fits into ten minutes"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return shown(command), None, f"{part}: FAILED with code {done.returncode}: {last}"
    return shown(command), json.loads(done.stdout.splitlines()[-1]), ""


def add_correctness(part: Part, command: str, found: dict[str, Any]) -> None:
    """Differences, and whether they are small enough."""
    for dtype, (logprobs, gradient) in MOST.items():
        one = found[dtype]
        right = one["logprobs"] <= logprobs and one["gradient"] <= gradient
        part.add(CHECKS, f"trainer, {dtype}", command, logprobs__max=[one["logprobs"]], gradient=[one["gradient"]])
        part.notes.append(
            f"{'right' if right else 'WRONG'}: trainer, {dtype} (at most {logprobs:g} nats, and {gradient:g} of the "
            "gradient's norm)"
        )
    equal = found["equal ids"]
    part.add(CHECKS, "engine, float32, temperature 0", command, equal__ids=[equal])
    word = "right" if equal >= LEAST_EQUAL_IDS else "WRONG"
    part.notes.append(f"{word}: engine (at least {LEAST_EQUAL_IDS:.0%} of the ids are those of the CPU)")


def add_rollout(part: Part, command: str, found: dict[str, Any]) -> None:
    """Rates, and the ratio where there is a peer."""
    peak = found.pop("peak GiB")
    for name, rates in found.items():
        part.add(ROLLOUT, name, command, **{engine: [rate] for engine, rate in rates.items()})
        if "vLLM" in rates:
            part.add(ROLLOUT, name, command, ratio=[rates["Palestra"] / rates["vLLM"]])
    if peak is not None:
        part.add(ROLLOUT, "peak memory of the engine", command, GiB=[peak])


def add_training(part: Part, command: str, found: dict[str, Any]) -> None:
    """A step, its pieces, and what the card could do."""
    row = f"{found['computed tokens']:,} computed tokens, {found['trained tokens']:,} trained"
    columns = {
        "step s": found["step s"],
        "sync s": found["sync s"],
        "tokens/s": [found["tokens a second"]],
        "TFLOP/s": [found["TFLOP a second"]],
        "products TFLOP/s": [found["product TFLOP a second"]],
        "MFU": [found["MFU"]],
        "peak GiB": [] if found["peak GiB"] is None else [found["peak GiB"]],
    }
    part.add(STEP, row, command, **columns)
    part.notes.append(
        "MFU is of the products' rate that was measured here; sync: from the trainer's weights to the engine's"
    )


def add_largest(part: Part, command: str, found: dict[str, Any]) -> None:
    """The last that fits, and the first that does not."""
    part.add(FITS, "fits", command, weights=[found["fits"] / 1e9])
    if found["does not"]:
        part.add(FITS, "does not", command, weights=[found["does not"] / 1e9])


PARTS: dict[str, Callable[[Part, str, dict[str, Any]], None]] = {
    "correctness": add_correctness,
    "training": add_training,
    "rollout": add_rollout,
    "largest": add_largest,
}


def device_line(rehearsal: bool) -> str | None:
    """Which card this is; None: there is none."""
    import torch

    if rehearsal:
        return f"REHEARSAL on a CPU ({platform.machine()}): these numbers are no measurement of anything"
    if not torch.cuda.is_available():
        return None
    card = torch.cuda.get_device_properties(0)
    return f"{card.name}, {card.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}, torch {torch.__version__}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts, print the tables, and write them; 1: something is wrong, 2: there is no card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=f"default: {SMOLLM2}, and {TINY} in a rehearsal")
    parser.add_argument("--out", type=Path, default=HERE / "gpu.md")
    parser.add_argument("--vllm", help="an interpreter of an environment with vLLM")
    parser.add_argument("--cpu", action="store_true", help="rehearse on a CPU")
    wanted = parser.parse_args(arguments)
    device = device_line(wanted.cpu)
    if device is None:
        print("bench/gpu.py needs a CUDA device, and torch sees none here; --cpu rehearses it", file=sys.stderr)
        return 2
    model = wanted.model or (TINY if wanted.cpu else SMOLLM2)
    options: list[object] = ["--device", "cpu" if wanted.cpu else "cuda", "--model", model]
    options += ["--rehearsal"] if wanted.cpu else []
    begin, found = time.monotonic(), Part(name="gpu")
    for name, add in PARTS.items():
        more = ["--vllm", wanted.vllm] if name == "rollout" and wanted.vllm else []
        command, result, problem = child(name, [*options, *more], SECONDS - (time.monotonic() - begin))
        if result is None:
            found.notes.append(problem)
        else:
            add(found, command, result)
    if not wanted.vllm:
        found.notes.append("vLLM is not beside the engine: --vllm names an interpreter that has it")
    seconds = time.monotonic() - begin
    with wanted.out.open("w", encoding="utf-8") as file:
        file.write(f"# {model} on one device\n\n{device}; {time.strftime('%Y-%m-%d')}; {seconds:.0f} s\n")
        show(found, Console(file=file, width=160))
    print(wanted.out.read_text(encoding="utf-8"))
    return int(any("WRONG" in note or "FAILED" in note or "stopped" in note for note in found.notes))


if __name__ == "__main__":
    sys.exit(main())
