"""Asks what needs a GPU, one question after another, and writes each answer down as soon as it is there.

python bench/gpu.py --list                                  all questions
python bench/gpu.py                                         all, into bench/results/gpu.json
python bench/gpu.py learns decoding --seconds 60            these two, each stopped after a minute
python bench/gpu.py rollouts-vllm --vllm .venv-peers/vllm/bin/python
python bench/gpu.py --dry-run                               the same code with tiny models on the CPU: no measurement
python bench/gpu.py --table                                 what was answered so far, as Markdown

Each question is asked in a process of its own (gpu_questions.py), whose memory and children go with it. An answer
replaces what the same card said before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from processes import HERE, ROOT, shown

RESULTS = HERE / "results" / "gpu.json"
SECONDS = 90.0  # for each question; --seconds
QUESTIONS = {  # in the order of their worth
    "learns": "SmolLM2-135M learns addition, engine and trainer on one card: held-out reward, seconds of a step",
    "train-0.6b": "all weights, Qwen3-0.6B's shape, rows of 8k and 16k tokens: tokens a second, MFU",
    "train-1.7b": "the same, 1.7B",
    "lora-4b": "LoRA of rank 32, 4B's shape, rows of 8k tokens",
    "profile": "where a training step of 0.6B's shape on 8k tokens spends the card's time, by kernel",
    "decoding": "a decoding pass of the embedded engine, 0.6B's shape, 1 to 64 replies",
    "rollouts": "sampled tokens a second of a job, 256 calls in flight, embedded engine, 0.6B's shape",
    "rollouts-vllm": "the same with vLLM as the job's engine",
    "bare-vllm": "the same prompts with vLLM alone",
    "learns-vllm": "`learns` with vLLM as the job's engine on the same card",
    "served": "vLLM's log-probabilities beside the trainer's, before and after new weights; their time",
    "shared": "16 groups of 8 rows that share their prompts, beside as many that share nothing",
    "equal": "a deterministic job twice: are the weights equal, bit for bit",
    "killed": "a job that is killed in its second step and resumed: what is there twice, or missing",
    "correctness": "log-probabilities, gradients and greedy ids, beside float32 on the CPU",
    "attention": "attention over trees and its gradient, beside float64 on the CPU",
    "sharded": "a trainer of one rank over NCCL, its checkpoints and CPU offload, beside the CPU",
    "lora-8b": "LoRA of rank 32, 8B's shape, rows of 8k tokens, layers computed again",
    "train-4b": "all weights, 4B's shape, 8k tokens, layers computed again",
    "largest": "the largest of some shapes of which all weights are trained",
}
NEED_VLLM = {"rollouts-vllm", "bare-vllm", "learns-vllm", "served"}


def device_line(dry: bool) -> str | None:
    """Which device this is; None: there is no card."""
    import torch

    if dry:
        return f"dry run on a CPU ({platform.machine()}): no measurement of anything"
    if not torch.cuda.is_available():
        return None
    card = torch.cuda.get_device_properties(0)
    return f"{card.name}, {card.total_memory / 2**30:.0f} GiB"


def ask(name: str, options: Sequence[object], seconds: float) -> dict[str, Any]:
    """Ask one question in a process group of its own, which is ended with it."""
    command = list(map(str, [sys.executable, HERE / "gpu_questions.py", name, *options]))
    began = time.monotonic()
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=ROOT
    )
    problem = ""
    try:
        out, errors = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        problem = f"stopped after {seconds:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    if problem:
        out, errors = child.communicate()
    answer: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1), "date": time.strftime("%Y-%m-%d")}
    answer["command"] = shown(["python", "bench/gpu.py", name])
    last = [line for line in out.splitlines() if line.startswith("{")][-1:]
    if last:  # a question may answer in parts, each line with all that is known
        answer["found"] = json.loads(last[0])
    if not problem and child.returncode:
        problem = f"failed with code {child.returncode}: {(errors.strip().splitlines() or ['no output'])[-1][:500]}"
    if problem:
        answer["problem"] = problem
        print(errors[-6000:], file=sys.stderr, flush=True)
    return answer


def keep(out: Path, device: str, name: str, answer: Mapping[str, Any]) -> None:
    """Write an answer into the file of all answers."""
    import torch

    known = json.loads(out.read_text()) if out.exists() else {}
    of_device = known.setdefault(device, {"torch": torch.__version__, "questions": {}})
    of_device["questions"][name] = answer
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(known, indent=1) + "\n")


def table(out: Path) -> str:
    """All answers as Markdown, and the questions that no card was asked."""
    known: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    cards = {device: found["questions"] for device, found in known.items() if not device.startswith("dry run")}
    lines = ["| question | card, date | found |", "|---|---|---|"]
    for name, text in QUESTIONS.items():
        asked = [(device, answers[name]) for device, answers in cards.items() if name in answers]
        for device, answer in asked:
            found = "; ".join([_told(answer.get("found", {})), *filter(None, [answer.get("problem")])])
            lines.append(f"| `{name}`: {text} | {device}, {answer['date']} | {found.removeprefix('; ')} |")
        if not asked:
            lines.append(f"| `{name}`: {text} | | not run |")
    return "\n".join(lines)


def _told(found: Any) -> str:
    if isinstance(found, dict):
        return "; ".join(f"{key}: {_told(value)}" for key, value in found.items())
    if isinstance(found, list):
        return ", ".join(map(_told, found))
    return f"{found:.4g}" if isinstance(found, float) else str(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask, and print what was found; 1: a question has no answer, 2: there is no card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", choices=[*QUESTIONS, []], metavar="QUESTION")
    parser.add_argument("--list", action="store_true", help="print all questions")
    parser.add_argument("--table", action="store_true", help="print all answers so far")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU")
    parser.add_argument(
        "--vllm", help="interpreter of an environment with vLLM; without it, its questions are left out"
    )
    parser.add_argument("--model", help="folder or name of the model that learns; default: SmolLM2-135M-Instruct")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each question; default: %(default).0f")
    parser.add_argument("--out", type=Path, default=RESULTS)
    wanted = parser.parse_args(arguments)
    if wanted.list or wanted.table:
        print(table(wanted.out) if wanted.table else "\n".join(f"{name:14} {text}" for name, text in QUESTIONS.items()))
        return 0
    device = device_line(wanted.dry_run)
    if device is None:
        print("bench/gpu.py needs a CUDA device, and torch sees none here; --dry-run goes without", file=sys.stderr)
        return 2
    options: list[object] = ["--dry-run"] if wanted.dry_run else []
    for option in ("vllm", "model"):
        options += [f"--{option}", getattr(wanted, option)] if getattr(wanted, option) else []
    problems = 0
    for name in wanted.questions or QUESTIONS:
        if name in NEED_VLLM and not wanted.vllm:
            print(f"{name}: left out, it needs --vllm", flush=True)
            continue
        answer = ask(name, options, wanted.seconds)
        keep(wanted.out, device, name, answer)
        problems += "problem" in answer
        print(
            f"{name} ({answer['seconds']} s): {_told(answer.get('found', {}))} {answer.get('problem', '')}", flush=True
        )
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())
