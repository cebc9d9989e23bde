"""`palestra compare`: runs algorithms over scenarios and seeds at equal sampled tokens, and writes a
page of results.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.cli.options import add_command
from palestra.errors import ConfigError, StoreError
from palestra.extensions import load_function, nearest
from palestra.terminal import TerminalConsole, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from palestra_control.wire import ResourcesBody
    from palestra_lab.comparison.kept import KeptResults
    from palestra_lab.comparison.plan import PlannedRun


def add_compare(commands: Any) -> None:
    """Add the command `compare`, which takes a compare.toml."""
    parser = add_command(
        commands,
        "compare",
        _run,
        "train algorithms on scenarios with several seeds, at equal sampled tokens, and write a page",
        "  palestra compare compare.toml\n"
        "  palestra compare compare.toml --only gomoku/grpo --only frozen-lake\n"
        "  palestra compare compare.toml --page docs/comparison.md   # the page there; finished runs stay\n"
        "  palestra compare compare.toml --results results.json      # so that another machine can continue it\n"
        "  palestra compare compare.toml --control http://10.0.0.5:7400 --gpus 0.5   # every run a job of a service\n\n"
        "the same command continues a comparison that was stopped or killed\n"
        "exit code: 0 all runs are finished, 1 some failed, 2 an error, 130 stopped",
    )
    parser.add_argument("config", metavar="COMPARE.TOML", type=Path, help="the grid (docs/how-to/compare.md)")
    parser.add_argument(
        "--page",
        metavar="FILE",
        type=Path,
        help="the page, in Markdown; without it, comparison.md in the output's folder",
    )
    parser.add_argument(
        "--results",
        metavar="FILE",
        type=Path,
        help="a JSON file to which the results of finished runs are written; runs that it has count as finished, so "
        "that a comparison can be continued on another machine. Without it, only folders of runs count",
    )
    parser.add_argument(
        "--only",
        metavar="SCENARIO[/ALGORITHM]",
        action="append",
        default=[],
        help="run only these runs; the page has all that are finished; may be given several times",
    )
    parser.add_argument("--list", action="store_true", help="list the runs and how far each is, and run nothing")
    parser.add_argument("--no-run", action="store_true", help="write the page from the finished runs, and run nothing")
    parser.add_argument(
        "--control",
        metavar="URL",
        help="submit the runs as jobs to this control plane, follow them, and fetch their files; the key is in "
        "PALESTRA_KEY. Without it, they run here, one after the other",
    )
    for name, metavar, what in (
        ("cpus", "CORES", "cores of each job, with --control; without it, 1"),
        ("gpus", "GPUS", "GPUs of each job, with --control: a part of one below 1; without it, none"),
        ("memory-gib", "GIB", "memory of each job, with --control; without it, its share of the machine"),
    ):
        parser.add_argument(f"--{name}", metavar=metavar, type=float, help=what)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)


def _run(arguments: argparse.Namespace) -> int:
    """Run unfinished runs, write the page after each, and return the exit code documented in the help."""
    if arguments.child:  # the process of one run, whose record takes the place of the grid
        from palestra_lab.comparison.one_run import run_recorded

        return run_recorded(arguments.config, load_function)
    from palestra_control.control import ControlClient
    from palestra_lab.comparison.execution import GridRunner, GridStopped, check_records, child_command, locked
    from palestra_lab.comparison.kept import KeptResults
    from palestra_lab.comparison.one_run import AGAIN, cause_of
    from palestra_lab.comparison.page import write_page
    from palestra_lab.comparison.plan import plan_runs
    from palestra_lab.comparison.progress import GridProgress
    from palestra_lab.comparison.results import read_results
    from palestra_lab.comparison.submitted import SubmittedGrid, check_not_submitted, check_submittable
    from palestra_lab.config import load_comparison

    comparison = load_comparison(arguments.config)
    runs = plan_runs(comparison, load_function)
    check_records(runs)
    kept = KeptResults(arguments.results, arguments.config.parent) if arguments.results is not None else None
    chosen = _chosen(arguments.only, runs)
    if arguments.list:
        _list(chosen, kept)
        return 0
    if kept is not None:
        chosen = [each for each in chosen if kept.rows(each) is None]
    page = arguments.page or comparison.folder / "comparison.md"

    if page.exists() and (page.is_dir() or page.samefile(arguments.config)):
        raise ConfigError(
            f"--page {page} is {'a folder' if page.is_dir() else 'the comparison itself'}; name another file"
        )

    def write() -> None:
        results = read_results(runs, kept)
        if kept is not None:
            kept.write()
        try:
            write_page(comparison, runs, results, page)
        except (OSError, StoreError) as error:
            # Where a file stands in place of its folder, `mkdir` says that the file exists.
            cause = "not a directory" if isinstance(error, FileExistsError) else cause_of(error)
            raise ConfigError(f"the page {page} could not be written: {cause}; {AGAIN}") from error

    resources = _resources(arguments)
    with locked(comparison.folder), contextlib.ExitStack() as opened:
        if arguments.no_run:
            write()
            say(f"page: {page}")
            return 0
        grid: GridRunner | SubmittedGrid
        if arguments.control is None:
            check_not_submitted(chosen)
            progress = GridProgress(chosen, TerminalConsole())
            opened.callback(progress.stopped)
            grid = GridRunner(chosen, child_command, comparison.checkpoints, progress, write)
        else:
            control = opened.enter_context(ControlClient(arguments.control))
            check_submittable(chosen, control.url)
            grid = SubmittedGrid(chosen, control, resources, comparison.checkpoints, say, write)
        try:
            failed = grid.run()
        except GridStopped:
            opened.close()
            write()
            goes_on = "" if arguments.control is None else "; the jobs continue in the service"
            say(
                f"stopped{goes_on}; go on with the same command (runs are in {comparison.folder}, the page so far is "
                f"{page})"
            )
            return 130
        write()
    say(f"page: {page}" + (f"; {failed} of {len(chosen)} runs failed, and are tried again next time" if failed else ""))
    return 1 if failed else 0


def _resources(arguments: argparse.Namespace) -> ResourcesBody:
    """Return the resources of each job of a service."""
    from palestra.client.plain_values import checked_amount
    from palestra_control.wire import ResourcesBody

    given = {name: getattr(arguments, name) for name in ("cpus", "gpus", "memory_gib")}
    found = {name: checked_amount(name, amount) for name, amount in given.items() if amount is not None}
    if found and arguments.control is None:
        raise ConfigError(f"--{next(iter(found)).replace('_', '-')} is of the jobs of a service; add --control URL")
    return ResourcesBody.model_validate(found)


def _chosen(only: Sequence[str], runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return the runs that `--only` names, all of them if it was not given."""
    known = dict.fromkeys(name for each in runs for name in (each.scenario, f"{each.scenario}/{each.algorithm}"))
    for name in only:
        if name not in known:
            hint = nearest(name, known) or f"; there are {', '.join(known)}"
            raise ConfigError(f"--only {name}: the comparison has no such runs{hint}")
    return [each for each in runs if not only or {each.scenario, f"{each.scenario}/{each.algorithm}"} & set(only)]


def _list(runs: Sequence[PlannedRun], kept: KeptResults | None) -> None:
    """Print a line for each run: its state, scenario, algorithm and seed, and its folder."""
    from palestra_lab.comparison.one_run import FINISHED, read_record

    for each in runs:
        known = FINISHED if kept is not None and kept.rows(each) is not None else "not started"
        state = (read_record(each.record) or {}).get("state", known)
        say(f"{state:<12} {each.label}   {each.folder}")
