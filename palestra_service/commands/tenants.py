"""`palestra tenants`: the operator adds tenants and sets their quotas."""

from __future__ import annotations

import argparse
from typing import Any
from urllib.parse import quote

from palestra.cli.options import add_command, add_control
from palestra.errors import ConfigError
from palestra.terminal import say

AMOUNTS = {
    "cpus": "cores at the same time; `none`: no limit",
    "gpus": "GPUs at the same time; `none`: no limit",
    "memory_gib": "GiB of memory at the same time; `none`: no limit",
    "jobs": "jobs that run at the same time; `none`: no limit",
    "adapters": "adapters on base servers, of jobs that are not over; `none`: no limit",
    "weight": "share of a base server's tokens, relative to tenants of weight 1; `none`: 1",
}


def add_tenants(commands: Any) -> None:
    """Add the command `tenants`, whose first argument is the action."""
    parser = add_command(
        commands,
        "tenants",
        _run,
        "list and add tenants of the cluster, and limit what each may hold",
        "  palestra tenants\n  palestra tenants add physics\n"
        "  palestra tenants key physics    # one more key of its admin\n"
        "  palestra tenants quota physics --gpus 2 --jobs 5\n"
        "  palestra tenants quota physics --jobs none\n  palestra tenants quota physics --none\n"
        "  palestra tenants private on    # of your own tenant, by its admin: jobs that say nothing are private",
    )
    parser.add_argument(
        "action",
        nargs="?",
        choices=("list", "add", "key", "quota", "private"),
        default="list",
        help="what to do",
    )
    parser.add_argument(
        "name", nargs="?", help="after `add`, `key` and `quota`: the tenant; after `private`: on or off"
    )
    for name, what in AMOUNTS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            metavar=name.partition("_")[2].upper() or name.upper(),
            type=_amount,
            default=argparse.SUPPRESS,
            help=f"{what}; without it, as before",
        )
    parser.add_argument("--none", action="store_true", help="after `quota`: take all limits away")
    add_control(parser)


def _run(arguments: argparse.Namespace) -> None:
    """List tenants, add one, create a key of its admin, set a quota, or set whether jobs are private."""
    if arguments.action != "list" and arguments.name is None:
        raise ConfigError(f"which one? palestra tenants {arguments.action} NAME")
    if arguments.action == "private" and arguments.name not in ("on", "off"):
        raise ConfigError("palestra tenants private on, or off")
    quota = {name: getattr(arguments, name) for name in AMOUNTS if hasattr(arguments, name)}
    if bool(quota or arguments.none) != (arguments.action == "quota") or (quota and arguments.none):
        raise ConfigError("a quota is set with `palestra tenants quota NAME --gpus N …`, or taken away with `--none`")
    from palestra.client.control import ControlClient

    with ControlClient(arguments.control) as control:
        if arguments.action == "list":
            for tenant in control.request("GET", "/tenants"):
                say(_line(tenant))
        elif arguments.action == "add":
            made = control.request("POST", "/tenants", json={"name": arguments.name})
            say(f"the key of {arguments.name}'s admin, shown this once:  {made['secret']}")
        elif arguments.action == "key":
            made = control.request("POST", f"/tenants/{quote(arguments.name, safe='')}/keys")
            say(f"a new key of {arguments.name}'s admin, shown this once:  {made['secret']}")
        elif arguments.action == "private":
            control.request("PATCH", "/tenant", json={"private_jobs": arguments.name == "on"})
        else:
            body = {"quota": dict.fromkeys(AMOUNTS) if arguments.none else quota}
            say(_line(control.request("PATCH", f"/tenants/{quote(arguments.name, safe='')}", json=body)))


def _line(tenant: dict[str, Any]) -> str:
    """Return a tenant's name and its limits as one line of the list."""
    limits = [f"{name} {amount:g}" for name, amount in tenant["quota"].items() if amount is not None]
    return f"{tenant['name']:<20} {', '.join(limits) or 'no quota'}"


def _amount(text: str) -> float | None:
    """Return the number of an option; None for the word `none`, which removes a limit."""
    return None if text == "none" else float(text)
