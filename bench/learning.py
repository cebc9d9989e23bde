"""What the recipes learn, over several seeds: `python bench/learning.py calculator --seeds 0 1 2`.

Each seed is one run of a recipe in a process of its own, as `python recipes/NAME.py` does it. The control is the
untrained model: the validation before the first step, the same tasks, the same greedy decoding. The recipe's part of
docs/learning.md is replaced, with its picture; the other parts stay as they are.

The results of a seed are kept in bench/learned/NAME.json, and the seed is not run again unless the recipe's code
changes or `--again` is given. If a run was stopped or killed, the same command continues it from its newest checkpoint,
where the recipe can be resumed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from learning_outcomes import ROOT, Curve, Kept, Outcome, curves, shares, tree

UNFINISHED = ROOT / "runs" / "learning"
PATIENT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}  # the machine is shared: threads that wait don't spin
MEASURED, SAMPLED = "validation/reward_mean", "train/reward_mean"
PAGE = ROOT / "docs" / "learning.md"
RUN = "import sys; sys.path.insert(0, {root!r}); from recipes.{recipe} import demonstrate; demonstrate({arguments})"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A script, and what is to be said about it."""

    script: str  # in recipes/, without .py
    variant: str = ""  # names this part where a script has several
    options: str = ""  # further arguments of its function
    run: str  # folder below runs/
    steps: int
    heading: str
    about: str  # what is trained, how, and what is scored; `{steps}` is filled in
    measure: str  # the axis of the picture
    best: float | None = None  # the most that can be had on average, where it is known and not 1
    below: float = 0.0  # the axis begins here
    tree: bool = False  # whether an episode is drawn, too
    kinds: bool = False  # whether the validation is shown by kind of task, which is the task's id without its last part
    resumes: bool = False  # whether the function takes `resume`
    sampled: str = ""  # metric of a step's episodes that the curve shows in place of validations

    @property
    def name(self) -> str:
        """Of the part of docs/learning.md."""
        return f"{self.script}-{self.variant}" if self.variant else self.script


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            script="addition",
            run="addition",
            resumes=True,
            steps=36,
            heading="Addition: one question, one answer",
            about="""
`recipes/addition.py`: {steps} steps of 16 sums x 6 answers, GRPO, two updates a step, all weights of
SmolLM2-135M-Instruct, AdamW with a learning rate that falls from 3e-5 to 0. The 64 validation sums are held out as
unordered pairs and never trained on; they are answered greedily, and one counts if the last number of the answer is
right. The control is the untrained model on the same sums.
""",
            measure="held-out sums answered right",
        ),
        Recipe(
            script="addition",
            variant="lora",
            options="lora=True",
            run="addition",
            resumes=True,
            steps=30,
            heading="Addition with an adapter",
            about="""
`recipes/addition.py --lora`: as above, but what is trained is an adapter (LoRA) of rank 16 on all linear layers,
with a learning rate that falls from 3e-4 to 0. The same sums are held out, and the control is the same.
""",
            measure="held-out sums answered right",
        ),
        Recipe(
            script="addition",
            variant="vllm",
            options=f"vllm={str(ROOT / '.venv-peers/vllm/bin/python')!r}",
            run="addition",
            steps=30,
            heading="Addition with vLLM as the engine",
            about="""
`recipes/addition.py --vllm .venv-peers/vllm/bin/python`: as the first one, but vLLM's build for CPUs samples,
and gets all weights after every step. The same sums are held out, and the control is the same.
""",
            measure="held-out sums answered right",
        ),
        Recipe(
            script="calculator",
            run="calculator",
            steps=6,
            heading="Calculator: a tool, two turns",
            about="""
`recipes/calculator.py`: {steps} steps of 8 products x 6 episodes, GRPO, all weights of SmolLM2-135M-Instruct,
a learning rate that falls from 3e-5 to 0. A product has three digits by two. The first turn may call the
calculator, its result is shown, and the second turn says the number; reward 1 if that is exactly right, else 0,
and nothing for the call as such. Two worked examples are in front of every question, in training and in the
control. The 48 validation products are held out and answered greedily. Without the tool (`python
recipes/calculator.py --in-the-head`) the untrained model answers 0 of them.
""",
            measure="held-out products answered right",
        ),
        Recipe(
            script="frozen_lake",
            run="frozen-lake",
            steps=24,
            heading="FrozenLake: many turns, one reward at the end",
            about="""
`recipes/frozen_lake.py`: {steps} steps of 2 groups x 64 walks, GRPO with credit by step and discount 0.95, 3
epochs, a model of 2 layers with random weights, a learning rate that falls from 5e-3 to 0. The map is
Gymnasium's 4 x 4, not slippery, so that greedy walks are all the same: the validation is 0 or 1, and 1 is the
best possible. How often a sampled walk arrives, of the 128 of a step, is in the columns of the first and the
last step.
""",
            measure="greedy walk arrives",
        ),
        Recipe(
            script="gomoku",
            run="gomoku",
            steps=25,
            heading="Gomoku: many turns, an opponent",
            about="""
`recipes/gomoku.py`: {steps} steps of 16 groups x 16 games on 3 x 3, the agent begins, the opponent moves at
random; GRPO, 2 epochs, a model of 2 layers with random weights, a learning rate that falls from 5e-3 to 0. Won
1, drawn 0.5, lost 0. Every move is one of the free places, by constrained decoding, for the control too. The
validation is 200 games with seeds of the opponent that are not trained on, played greedily. Perfect play brings
0.997 a game on average (expectimax, `bench/perfect_gomoku.py`).
""",
            measure="reward of a game, 200 fresh games",
            best=0.9974,
        ),
        Recipe(
            script="subagents",
            run="subagents",
            steps=6,
            heading="Subagents: a tree of conversations",
            about="""
`recipes/subagents.py`: {steps} steps of 4 sums x 8 episodes, GRPO, all weights of SmolLM2-135M-Instruct,
temperature 0.7, a learning rate that falls from 3e-5 to 0 after a step of warm-up. The agent is asked for (a +
b) + (c + d); it gives each half to a subagent, both calls in one reply; they answer at the same time; it says
the sum. Reward 1 for the right sum, and 0.5 for each subagent with the right sum of its half: at most 2 an
episode. Credit is by episode: all calls of the tree share its reward, so that the agent earns from what its
subagents get right before it can add. Three worked examples are in front of every question to the agent, in
training and in the control; subagents see none. The 16 validation sums are held out and answered greedily. A
reward of 1 can be the sum alone or, as in the episode below, both halves right and their sum wrong: six steps
teach to delegate and to do the halves, and only begin to teach the last sum.
""",
            measure="reward of an episode (at most 2)",
            best=2.0,
            tree=True,
        ),
        Recipe(
            script="miniwob",
            run="miniwob",
            steps=10,
            heading="MiniWoB: web pages in a browser",
            about="""
`recipes/miniwob.py`: one model learns five pages of MiniWoB++ together, in Chromium: {steps} steps of 8 problems x 6
episodes, GRPO, all weights of SmolLM2-135M-Instruct, a learning rate that falls from 3e-5 to 0. The model reads the
task and the page's controls as lines of text, and replies with one line such as `click Submit`, which is held to what
the page allows, for the control too: a click, an option of a list, or, in a field, a text that the task quotes.
`enter-text` and `choose-list` take two such actions; `focus-text` has one control. The reward is the page's own: 1 for
a problem that is solved, else 0. The 10 held-out problems of each page have seeds that are not trained on, and are
played greedily; `enter-text` has 50 names, so that most of its texts are seen in training, too.
""",
            measure="held-out problems solved",
            kinds=True,
            resumes=True,
        ),
        Recipe(
            script="terminal",
            run="terminal",
            steps=6,
            heading="A shell in a sandbox",
            about="""
`recipes/terminal.py`: {steps} steps of 6 tasks x 8 episodes, GRPO, all weights of SmolLM2-135M-Instruct, a learning
rate that falls from 3e-5 to 0. The model is asked to count lines, to find the file with a word, or to change one
setting. Its reply, in the control too, is one of a few dozen lines: `run` and one of three commands with any word of
the task in it, or `finish` and a word that it has just read. A worked example of each kind is in front of every task,
in training and in the control. Reward 1 if the answer is right, or the file, else 0. The 16
held-out tasks of each kind are in no training task, and are played greedily.
""",
            measure="held-out tasks solved",
            kinds=True,
            resumes=True,
        ),
        Recipe(
            script="judged_answers",
            run="judged",
            steps=12,
            sampled="train/rewards/gold",
            heading="A judge in place of a reward: polite, short answers",
            about="""
`recipes/judged_answers.py`: {steps} steps of 2 wishes x 16 replies, GRPO, a model of 2 layers with random weights, a
learning rate that falls from 5e-3 to 0. A reply is one of eight sentences, by constrained decoding. A rubric behind
HTTP judges politeness and length, and errs in one answer of ten about politeness; its two verdicts are the reward.
Drawn and in the table is a hidden measure of the replies that each step samples, which is no reward: 1 for a reply
that is polite and short, else 0. Those of step 1 are the untrained model's.
""",
            measure="polite and short replies (hidden)",
        ),
        Recipe(
            script="mixture",
            run="mixture",
            steps=12,
            heading="A mixture of three environments, with a curriculum",
            about="""
`recipes/mixture.py`: {steps} steps of 8 groups x 8 replies of a model of 2 layers with random weights, GRPO, a learning
rate that falls from 5e-3 to 0. Of 8 groups, `colours` has 5, `moods` 2 and `riddles` 1; two thirds of the tasks of
`colours` and all of `riddles` have no right answer. A reply is one of four words, by constrained decoding. Validation
tasks have numbers that are not trained on; 0.40 is the best possible over all of them.
""",
            measure="held-out tasks answered right",
            best=0.4,
            kinds=True,
        ),
        Recipe(
            script="harness_tool",
            run="harness-tool",
            steps=8,
            heading="A program with one tool, on tasks of Harbor's format",
            about="""
`recipes/harness_tool.py`: {steps} steps of 5 tasks x 8 episodes, GRPO, all weights of SmolLM2-135M-Instruct, a learning
rate that falls from 1e-4 to 0, sampling at temperature 1.5. Each episode is a new process of it. It calls
the model once. The tool's schema, in the control too, holds the reply to six scripts: five solve a task each, one none.
Reward: what the task's verifier pays for the script that the program left. No task is held out: the same five are
played greedily.
""",
            measure="tasks solved",
        ),
    )
}


def play(recipe: Recipe, seed: int, steps: int) -> Outcome:
    """Run the recipe once, or go on with it; its time includes loading, evaluation and checkpoints."""
    folder = UNFINISHED / f"{recipe.name}-{seed}-steps-{steps}"
    run, spent = folder / "runs" / recipe.run, folder / "spent.json"
    resume = recipe.resumes and (run / "checkpoints").is_dir() and any((run / "checkpoints").iterdir())
    if not resume:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        spent.write_text("[0, 0, 0]")
    words = (str(steps), str(seed), "resume=True" if resume else "", recipe.options)
    code = RUN.format(root=str(ROOT), recipe=recipe.script, arguments=", ".join(filter(None, words)))
    wall_seconds, cpu_seconds, peak_mib = json.loads(spent.read_text())
    started = time.monotonic()
    with (folder / "output.txt").open("a") as output:
        process = subprocess.Popen([sys.executable, "-c", code], cwd=folder, env=os.environ | PATIENT, stdout=output)
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.terminate()
            _, status, usage = os.wait4(process.pid, 0)
            raise
        finally:
            wall_seconds += time.monotonic() - started
            cpu_seconds += usage.ru_utime + usage.ru_stime
            peak_mib = max(peak_mib, usage.ru_maxrss / 1024)
            spent.write_text(json.dumps([wall_seconds, cpu_seconds, peak_mib]))
    if status:
        raise SystemExit(f"seed {seed} failed; {folder / 'output.txt'} says more")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if recipe.sampled:
        rows = [{"step": r["step"], MEASURED: r[recipe.sampled], SAMPLED: r[recipe.sampled]} for r in rows[1:]]
    outcome = Outcome(
        seed=seed,
        rows=rows,
        wall_seconds=wall_seconds,
        cpu_seconds=cpu_seconds,
        peak_mib=peak_mib,
        load=os.getloadavg()[0],
        shares=((rows[0][MEASURED], 0.0), (rows[-1][MEASURED], 0.0)) if recipe.sampled else shares(run),
        tree=tree(run) if recipe.tree else "",
        machine=machine(),
        day=str(datetime.date.today()),
    )
    if recipe.kinds:
        outcome.parts = curves(run, [step for step, _ in outcome.validation()])
    shutil.rmtree(folder)
    return outcome


def draw(recipe: Recipe, outcomes: list[Outcome], path: Path) -> None:
    """Validation over steps, a line a seed; the mean of the sampled rewards over all seeds behind them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    sampled = [fmean(values) for values in zip(*(o.sampled() for o in outcomes), strict=True)]
    if sampled:
        axes.plot(range(1, len(sampled) + 1), sampled, color="#aaaaaa", lw=5, alpha=0.5, label="sampled, mean")
    plot_seeds(axes, [(outcome.seed, outcome.validation()) for outcome in outcomes])
    top = recipe.best or 1.0
    if recipe.best:
        axes.axhline(recipe.best, color="#222222", ls="--", lw=1.0, label="best possible")
    axes.set(xlabel="training step", ylabel=recipe.measure, title=recipe.heading, ylim=(recipe.below, top * 1.04))
    figure.legend(frameon=False, loc="outside right upper")
    figure.savefig(path)


def draw_kinds(recipe: Recipe, outcomes: list[Outcome], path: Path) -> None:
    """Validation over steps, a panel a kind of task, a line a seed."""
    from matplotlib.figure import Figure

    kinds = list(outcomes[0].parts)
    rows = -(-len(kinds) // 3)
    figure = Figure(figsize=(8.4, 2.5 * rows + 0.3), dpi=150, layout="constrained")
    panels = list(figure.subplots(rows, 3, sharey=True, squeeze=False).flat)
    for axes, kind in zip(panels, kinds, strict=False):
        plot_seeds(axes, [(outcome.seed, outcome.parts[kind]) for outcome in outcomes])
        axes.set(title=kind, ylim=(0, 1.04))
    for axes in panels[len(kinds) :]:
        axes.remove()
    figure.supxlabel("training step", fontsize="medium")
    figure.supylabel(recipe.measure, fontsize="medium")
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, loc="outside upper center", ncols=4)
    figure.savefig(path)


def plot_seeds(axes: Any, seeds: list[tuple[int, Curve]]) -> None:
    """Plot a line for each seed, and one for the untrained model."""
    for seed, curve in seeds:
        axes.plot(*zip(*curve, strict=True), marker="o", ms=4, lw=1.8, label=f"seed {seed}")
    axes.axhline(seeds[0][1][0][1], color="#777777", ls=":", lw=1.2, label="untrained model")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)


def part(recipe: Recipe, outcomes: list[Outcome], steps: int) -> str:
    """What docs/learning.md says of a recipe."""
    ends = [o.validation()[-1][1] for o in outcomes]
    seeds = " ".join(str(o.seed) for o in outcomes)
    reached = f"over {len(ends)} seeds, from {min(ends):.2f} to {max(ends):.2f}" if ends[1:] else f"{ends[0]:.2f}"
    first = [o.validation()[0][1] for o in outcomes]
    begun = f"{min(first):.2f}" + (f" to {max(first):.2f}" if max(first) > min(first) else "")
    command = f"python bench/learning.py {recipe.name} --seeds {seeds}"
    machines = ", ".join(dict.fromkeys(o.machine or machine() for o in outcomes))
    days = ", ".join(dict.fromkeys(o.day or str(datetime.date.today()) for o in outcomes))
    lines = [
        f"## {recipe.heading}",
        "",
        recipe.about.strip().format(steps=steps),
        "",
        f"Untrained {begun}; at step {steps}, {reached}.",
        "",
        f"![{'sampled replies' if recipe.sampled else 'validation'} over steps]({picture(recipe).name})",
        "",
        f"| seed | untrained | step {steps} | reward exactly 1: untrained | step {steps} | sampled, step 1 "
        "| last 3 steps | wall s | CPU s | peak MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for o in outcomes:
        scores, sampled = [score for _, score in o.validation()], o.sampled()
        lines.append(
            f"| {o.seed} | {scores[0]:.2f} | {scores[-1]:.2f} | {o.shares[0][0]:.0%} | {o.shares[1][0]:.0%} | "
            f"{sampled[0]:.2f} | {fmean(sampled[-3:]):.2f} | "
            f"{o.wall_seconds:.0f} | {o.cpu_seconds:.0f} | {o.peak_mib:.0f} |"
        )
    if recipe.kinds:
        lines += ["", *kinds_table(outcomes, steps)]
    lines += [
        "",
        f"`{command}`. Wall and CPU seconds are of the whole process: loading, evaluations, checkpoints.",
        f"Machine: {machines}; {days}; load average at the ends of the runs: "
        f"{', '.join(f'{o.load:.1f}' for o in outcomes)} (above 2, other work shared the cores).",
    ]
    if recipe.tree:
        drawn = f"An episode of step {steps}, seed {outcomes[0].seed}, as `palestra episodes RUN EPISODE` draws it:"
        lines += ["", drawn, "", "```console", outcomes[0].tree, "```"]
    return "\n".join(lines) + "\n"


def kinds_table(outcomes: list[Outcome], steps: int) -> list[str]:
    """A row a kind of task: untrained, and at the end by seed."""
    ends = " | ".join(f"step {steps}, seed {o.seed}" for o in outcomes)
    lines = [f"| held-out tasks, greedily | untrained | {ends} |", "|---|---|" + "---|" * len(outcomes)]
    for kind, curve in outcomes[0].parts.items():
        scores = " | ".join(f"{o.parts[kind][-1][1]:.2f}" for o in outcomes)
        lines.append(f"| {kind} | {curve[0][1]:.2f} | {scores} |")
    return lines


def picture(recipe: Recipe) -> Path:
    """Where the curves are drawn."""
    return PAGE.with_name("learning.png" if recipe.name == "addition" else f"learning-{recipe.name}.png")


def written(page: str, name: str, text: str) -> str:
    """The page with the part of this name in place of the one before, or at the end."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    if begin not in page:
        return f"{page}\n{begin}{text}{end}"
    head, _, rest = page.partition(begin)
    return head + begin + text + end + rest.partition(end)[2]


def machine() -> str:
    """Processor, cores, and what is used of them."""
    names = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    cores = len(os.sched_getaffinity(0))
    return f"{names[0] if names else platform.processor()}, {cores} core{'s' * (cores > 1)}, no GPU"


def main() -> None:
    """Run all seeds, one after another."""
    parser = argparse.ArgumentParser(description="A recipe over several seeds.")
    parser.add_argument("recipe", nargs="?", default="addition", choices=RECIPES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="None: as many as the recipe has")
    parser.add_argument("--again", action="store_true", help="play seeds whose outcome is kept, too")
    arguments = parser.parse_args()
    recipe = RECIPES[arguments.recipe]
    steps = arguments.steps or recipe.steps
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the process of the seed is ended, too
    kept, outcomes = Kept(recipe.name, recipe.script, steps), []
    for seed in arguments.seeds:
        outcome = None if arguments.again else kept.outcome(seed)
        if outcome is None:
            outcome = play(recipe, seed, steps)
            kept.keep(outcome)
        outcomes.append(outcome)
        print(f"seed {seed}: {outcome.validation()}, {outcome.wall_seconds:.0f} s", flush=True)
        (draw_kinds if recipe.kinds else draw)(recipe, outcomes, picture(recipe))
        PAGE.write_text(written(PAGE.read_text(), recipe.name, part(recipe, outcomes, steps)))


if __name__ == "__main__":
    main()
