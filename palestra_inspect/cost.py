"""`palestra cost`: what a run, or the jobs of a tenant, have spent, by phase, policy and episode."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.cli.options import RUN, add_command, add_control, add_set, is_served, overrides, run_folder, time_span
from palestra.errors import ConfigError, PalestraError
from palestra.terminal import TerminalConsole, one_line, say

if TYPE_CHECKING:
    from palestra.dashboard.answers import Cost, CostsAnswer


def add_cost(commands: Any) -> None:
    """Add the command `cost`, which takes a run, or sums up the jobs of a tenant."""
    parser = add_command(
        commands,
        "cost",
        _run,
        "say what a run has spent: tokens, hours and, with [prices], money",
        "  palestra cost runs/addition                 # the run may be running\n"
        "  palestra cost runs/addition --episodes 10   # and its ten dearest episodes\n"
        "  palestra cost runs/addition --set prices.device_hour=2.5   # with other prices than the job's\n"
        "  palestra cost job-1f3a5c7e9b2d4f60          # a job of a service\n"
        "  palestra cost --tenant physics --since 168h # all jobs of your tenant in the last week",
    )
    parser.add_argument("run_dir", metavar="RUN", nargs="?", help=f"{RUN}; without it, all jobs of your tenant")
    parser.add_argument("--episodes", metavar="EPISODES", type=int, default=0, help="how many of the dearest to list")
    parser.add_argument(
        "--since", metavar="TIME", type=time_span, help="without RUN: jobs that have changed in this time, such as 24h"
    )
    parser.add_argument("--tenant", help="without RUN: your tenant, which is the only one that you may see")
    parser.add_argument("--user", help="without RUN: only jobs of this user")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with money as an exact number")
    add_set(parser)
    add_control(parser)


def _run(arguments: argparse.Namespace) -> None:
    """Print what a run, or the jobs of a tenant, have cost."""
    source = arguments.run_dir
    if source is None:
        _show_jobs(arguments)
        return
    if arguments.since is not None or arguments.user is not None or arguments.tenant is not None:
        raise ConfigError("--since, --tenant and --user choose among the jobs of a tenant; leave RUN out")
    found = _served(source, arguments) if is_served(source) else _local(Path(source), arguments)
    if arguments.json:
        say(found.model_dump_json())
        return
    _show("phase", found.phases, found)
    _show("policy or server", found.payees, found)
    if found.episodes:
        _show("episode", found.episodes, found)
    if not found.counted:
        say("calls are not counted: a job counts them that has [prices] or a [budget]")
    if not found.priced:
        say("without money: the job has no [prices]")


def _local(folder: Path, arguments: argparse.Namespace) -> CostsAnswer:
    """Return the costs of a run in a folder, with the prices of `--set`."""
    from palestra.config import parse_config
    from palestra.dashboard.costs import read_costs

    folder, config = run_folder(folder)
    if changed := overrides(arguments.set):
        config = parse_config(config.model_dump(mode="json", exclude_none=True), changed)
    return read_costs(folder, config, max(arguments.episodes, 0))


def _served(source: str, arguments: argparse.Namespace) -> CostsAnswer:
    """Return the costs of a run at a server."""
    from palestra_inspect.served_run import served_run

    if arguments.episodes or arguments.set:
        raise ConfigError("--episodes and --set need the run's folder")
    with served_run(source, arguments.control) as run:
        return run.costs()


def _show_jobs(arguments: argparse.Namespace) -> None:
    """Print what each job of the tenant has cost that has changed lately, with the sum of all."""
    from palestra.dashboard.costs import summed
    from palestra_control.control import ControlClient
    from palestra_inspect.served_run import served_run

    if arguments.since is None:
        raise ConfigError("name a run, or say --since, such as --since 24h, for all jobs of your tenant")
    oldest, found = time.time() - arguments.since, dict[str, "CostsAnswer"]()
    with ControlClient(arguments.control) as control:
        own = control.request("GET", "/me")["tenant"]
        if arguments.tenant not in (None, own):
            raise ConfigError(
                f"your key is of tenant {own}, and sees only that; operators see what others have spent of their "
                "budgets with `palestra tenants`"
            )
        for job in control.jobs(**({} if arguments.user is None else {"user": arguments.user})):
            if job.changed_at >= oldest and job.starts:
                try:
                    with served_run(job.job_id, arguments.control) as run:
                        found[f"{job.job_id} {job.name}"] = run.costs()
                except PalestraError as error:  # its folder was removed, perhaps
                    say(f"palestra: {job.job_id}: {one_line(str(error))}", file=sys.stderr)
    whole = summed("jobs", found)
    if arguments.json:
        say(whole.model_dump_json())
        return
    _show("job", whole.payees, whole)
    _show("phase", whole.phases, whole)


def _show(title: str, rows: Sequence[Cost], found: CostsAnswer) -> None:
    """Print a table of costs with their sum."""
    from rich.table import Table

    from palestra.types.progress import duration

    table = Table(box=None, pad_edge=False)
    timed = ("time",) if title != "episode" else ()  # episodes share the time of devices
    for name in (title, "calls", "tokens in", "tokens out", *timed, *(("money",) if found.priced else ())):
        table.add_column(name, justify="left" if name == title else "right")
    for line in (*rows, found.total):
        counts = (f"{number:,}" for number in (line.calls, line.prompt_tokens, line.reply_tokens))
        money = (line.shown,) if found.priced else ()
        took = (duration(line.ms / 1000),) if timed else ()
        table.add_row(one_line(line.name), *counts, *took, *money)
    console = TerminalConsole()
    console.print(table)
    console.print()
