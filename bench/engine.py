"""The embedded engine in turns with `generate` and vLLM's CPU build, the arithmetic floor beside them; the gateway.

As a program, a short form: Palestra and vLLM alone in turns, medians and ratios: python bench/engine.py [--rounds 2]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import engine_gateway
from engine_runners import GENERATE, PALESTRA, VLLM, VLLM_PYTHON, Contestant, Runner, contestants, running
from engine_work import CONVERSATIONS, FIRST_TOKENS, NEW_TOKENS, PROMPT_TOKENS, REPLIES, WORKS
from figures import Part
from processes import HERE, ROOT, run_json, shown

from palestra.models.catalog import SMOLLM2, model_folder

RATE_TABLE = (
    f"Engine: tokens sampled a second, SmolLM2-135M in bf16, prompts of {PROMPT_TOKENS} tokens, {NEW_TOKENS} sampled"
)
FIRST_TABLE = f"Engine: time to the first token of a prompt of {PROMPT_TOKENS} tokens that arrives while others run"
FLOOR_TABLE = "Arithmetic floor of that work (a pass: its products, or reading the weights once)"
RATES_TABLE = "What the floor is made of"

Seconds = dict[tuple[str, str], list[float]]  # by (work, contestant): of all repeats of all rounds


def run(part: Part, threads: int, quick: bool) -> None:
    """All contestants in turns at each piece of work, each round in another order, then the gateway."""
    field = contestants(threads)
    if VLLM not in [one.name for one in field]:
        part.notes.append(f"vLLM is skipped: no {VLLM_PYTHON.relative_to(ROOT)}; bench/peers/README.md says how")
    with ExitStack() as stack:
        runners = [stack.enter_context(running(one)) for one in field]
        rounds(runners, [0])  # a warm-up, not counted
        found = rounds(runners, range(1, 3 if quick else 8))
    command = (sys.executable, HERE / "engine_floor.py", "--model", model_folder(SMOLLM2), "--threads", threads)
    floors = [run_json(command) for _ in range(3)]
    add_rates(part, field, found, floors)
    add_first_tokens(part, field, found)
    add_floors(part, shown(command), found, floors)
    part.notes.append(
        f"{threads} threads; every reply was checked to have {NEW_TOKENS} tokens; prompts are new in every round; "
        f"generate has the malloc settings that Palestra gives itself"
    )
    engine_gateway.run(part, quick)


def rounds(runners: Sequence[Runner], numbers: Iterable[int]) -> Seconds:
    """Every piece of work in every round; what disturbs the machine disturbs all."""
    found: Seconds = {}
    for number in numbers:
        for name, work in WORKS.items():
            for runner in runners if number % 2 else reversed(runners):
                one = runner.contestant.name
                if not (work.probed and one == GENERATE):
                    found.setdefault((name, one), []).extend(runner.seconds(name, number))
    return found


def add_rates(part: Part, field: Sequence[Contestant], found: Seconds, floors: Sequence[Mapping[str, Any]]) -> None:
    """Tokens a second, and how many times as fast Palestra is."""
    for name, work in (REPLIES | CONVERSATIONS).items():
        rates = {one.name: [work.sampled / seconds for seconds in found[name, one.name]] for one in field}
        for one in field:
            part.add(RATE_TABLE, name, one.shown, **{f"{one.name} tokens_per_s": rates[one.name]})
        least = [work.sampled / floor["seconds"][name] for floor in floors]
        part.add(RATE_TABLE, name, field[0].shown, **{"floor allows tokens_per_s": least})
        ours = statistics.median(rates[PALESTRA])
        for one in field[1:]:
            times = ours / statistics.median(rates[one.name])
            part.add(RATE_TABLE, name, one.shown, **{f"times {one.name}": [times]})


def add_first_tokens(part: Part, field: Sequence[Contestant], found: Seconds) -> None:
    """Milliseconds; `generate` takes nobody in while it runs."""
    for name in FIRST_TOKENS:
        for one in field:
            if (name, one.name) in found:
                times = [1e3 * seconds for seconds in found[name, one.name]]
                part.add(FIRST_TABLE, name, one.shown, **{f"{one.name} ms": times})


def add_floors(part: Part, command: str, found: Seconds, floors: Sequence[Mapping[str, Any]]) -> None:
    """What arithmetic and memory alone would take, and how many times that Palestra takes."""
    for shape in floors[0]["gflops_by_shape"]:
        rates = [floor["gflops_by_shape"][shape] for floor in floors]
        part.add(RATES_TABLE, f"bf16 product {shape}", command, GFLOP_per_s=rates)
    reading = [floor["read_gb_per_second"] for floor in floors]
    part.add(RATES_TABLE, "reading memory", command, GB_per_s=reading)
    for name in WORKS:
        least = [floor["seconds"][name] for floor in floors]
        taken = found[name, PALESTRA]
        times = statistics.median(taken) / statistics.median(least)
        part.add(FLOOR_TABLE, name, command, floor__s=least, Palestra__s=taken, times__the__floor=[times])


def main() -> None:
    """Measure Palestra and vLLM in turns, and print medians of all rounds but the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    wanted = parser.parse_args()
    field = [one for one in contestants(wanted.threads) if one.name != GENERATE]
    if len(field) < 2:
        parser.error(f"no {VLLM_PYTHON.relative_to(ROOT)}; bench/peers/README.md says how")
    with ExitStack() as stack:
        runners = [stack.enter_context(running(one)) for one in field]
        rounds(runners, [0])
        found = rounds(runners, range(1, wanted.rounds + 1))
    print("| | Palestra | vLLM | ratio |\n|---|--:|--:|--:|")
    for name, work in WORKS.items():
        ours, theirs = (statistics.median(found[name, one]) for one in (PALESTRA, VLLM))
        if work.probed:
            print(f"| first token, {name}, ms | {1e3 * ours:.0f} | {1e3 * theirs:.0f} | {ours / theirs:.2f} |")
        else:
            rates = f"{work.sampled / ours:.1f} | {work.sampled / theirs:.1f}"
            print(f"| {name}, tokens/s | {rates} | {theirs / ours:.2f} |")


if __name__ == "__main__":
    main()
