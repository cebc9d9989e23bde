"""`palestra tenants`, `users` and `keys`: who may use a service, and how much of it."""

from __future__ import annotations

import argparse
import time
from functools import partial
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
    "money": "budget of all jobs together, in the currency of their [prices]; `none`: no limit",
    "hours": "budget of all jobs together: hours for which they run; `none`: no limit",
    "tokens": "budget of all jobs together: tokens of prompts and replies; `none`: no limit",
}


def add_tenants(commands: Any) -> None:
    """Add the command `tenants`, whose first argument is the action."""
    parser = add_command(
        commands,
        "tenants",
        _tenants,
        "list and add tenants of the cluster, and limit what each may hold",
        "  palestra tenants\n  palestra tenants add physics\n"
        "  palestra tenants key physics    # one more key of its admin\n"
        "  palestra tenants quota physics --gpus 2 --jobs 5\n"
        "  palestra tenants quota physics --money 500    # a budget of its jobs together\n"
        "  palestra tenants quota physics --jobs none\n  palestra tenants quota physics --none",
    )
    _add_action(parser, "list", "add", "key", "quota")
    parser.add_argument("name", nargs="?", help="after `add`, `key` and `quota`: the tenant")
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


def _tenants(arguments: argparse.Namespace) -> None:
    """List tenants, add one, create a key of its admin, or set a quota."""
    if arguments.action != "list" and arguments.name is None:
        raise ConfigError(f"which one? palestra tenants {arguments.action} NAME")
    quota = {name: getattr(arguments, name) for name in AMOUNTS if hasattr(arguments, name)}
    if bool(quota or arguments.none) != (arguments.action == "quota") or (quota and arguments.none):
        raise ConfigError("a quota is set with `palestra tenants quota NAME --gpus N …`, or taken away with `--none`")
    ask, name = partial(_ask, arguments), quote(arguments.name or "", safe="")
    if arguments.action == "list":
        for tenant in ask("GET", "/tenants"):
            say(_line(tenant))
    elif arguments.action == "add":
        _show_key(f"the key of {arguments.name}'s admin", ask("POST", "/tenants", json={"name": arguments.name}))
    elif arguments.action == "key":
        _show_key(f"a new key of {arguments.name}'s admin", ask("POST", f"/tenants/{name}/keys"))
    else:
        body = {"quota": dict.fromkeys(AMOUNTS) if arguments.none else quota}
        say(_line(ask("PATCH", f"/tenants/{name}", json=body)))


def _add_action(parser: argparse.ArgumentParser, *actions: str) -> None:
    parser.add_argument("action", nargs="?", choices=actions, default="list", help="what to do")


def _ask(arguments: argparse.Namespace, method: str, path: str, **more: Any) -> Any:
    from palestra_control.control import ControlClient

    with ControlClient(arguments.control) as control:
        return control.request(method, path, **more)


def _show_key(which: str, made: dict[str, Any]) -> None:
    say(f"{which}, shown this once:  {made['secret']}")


def _line(tenant: dict[str, Any]) -> str:
    """Return a tenant's name and its limits as one line of the list."""
    spent = tenant.get("spent") or {}
    limits = [
        f"{name} {amount:g}" + (f" ({spent[name]:.4g} spent)" if name in spent else "")
        for name, amount in tenant["quota"].items()
        if amount is not None
    ]
    return f"{tenant['name']:<20} {', '.join(limits) or 'no quota'}"


def _amount(text: str) -> float | None:
    """Return the number of an option; None for the word `none`, which removes a limit."""
    return None if text == "none" else float(text)


LIMITS = ("requests_per_minute", "burst", "open_jobs", "body_bytes", "episodes_in_flight")  # of `LimitsBody`


def add_users(commands: Any) -> None:
    """Add the commands `users` and `keys`, whose first argument is the action."""
    parser = add_command(
        commands,
        "users",
        users,
        "list, add, change and remove the users of your tenant",
        "  palestra users\n  palestra users add ann --role member\n  palestra users role ann admin",
    )
    _add_action(parser, "list", "add", "role", "remove")
    parser.add_argument("name", nargs="?", help="after `add`, `role` and `remove`: the user")
    parser.add_argument("new_role", nargs="?", choices=("admin", "member"), help="after `role`: the new role")
    parser.add_argument(
        "--role", choices=("admin", "member"), default="member", help="after `add`: the role of the new user"
    )
    add_control(parser)
    parser = add_command(
        commands,
        "keys",
        keys,
        "list, make and revoke the keys of a user",
        "  palestra keys\n  palestra keys make --label laptop --days 90\n"
        "  palestra keys make --user ann --limit open_jobs=5 --limit requests_per_minute=60\n  palestra keys revoke ID",
    )
    _add_action(parser, "list", "make", "revoke")
    parser.add_argument("key_id", metavar="ID", nargs="?", help="after `revoke`: the key")
    parser.add_argument("--user", help="the user whose keys are meant; without it, you")
    parser.add_argument("--label", default="", help="name of a new key; without it, none")
    parser.add_argument(
        "--limit",
        metavar="NAME=N",
        action="append",
        default=[],
        type=_limit,
        help=f"a limit of a new key, set by an admin; may be given several times: {', '.join(LIMITS)}",
    )
    parser.add_argument("--days", metavar="DAYS", type=float, help="after which a new key expires; without it, never")
    add_control(parser)


def users(arguments: argparse.Namespace) -> None:
    """List users, add one, change a role, or remove one."""
    if arguments.action != "list" and arguments.name is None:
        raise ConfigError(f"whom? palestra users {arguments.action} NAME")
    if arguments.action == "role" and arguments.new_role is None:
        raise ConfigError(f"which role? palestra users role {arguments.name} admin|member")
    ask, path = partial(_ask, arguments), f"/users/{quote(arguments.name or '', safe='')}"
    if arguments.action == "list":
        for user in ask("GET", "/users"):
            say(f"{user['name']:<20} {user['role']:<8}{' removed' if user['removed_at'] else ''}")
    elif arguments.action == "add":
        made = ask("POST", "/users", json={"name": arguments.name, "role": arguments.role})
        _show_key(f"the key of {arguments.name}", made)
    elif arguments.action == "role":
        ask("PATCH", path, json={"role": arguments.new_role})
    else:
        ask("DELETE", path)


def keys(arguments: argparse.Namespace) -> None:
    """List keys, or create or revoke one; a new key is printed once."""
    if arguments.action == "revoke" and arguments.key_id is None:
        raise ConfigError("which key? palestra keys revoke ID; `palestra keys` lists them")
    ask = partial(_ask, arguments)
    if arguments.action == "list":
        for key in ask("GET", "/keys", params={"user": arguments.user} if arguments.user else {}):
            state = "revoked" if key["revoked_at"] else "" if not key["expires_at"] else _until(key["expires_at"])
            say(f"{key['key_id']}  {key['label']:<20} {state}".rstrip())
    elif arguments.action == "make":
        body = {"user": arguments.user, "label": arguments.label}
        body["lifetime_seconds"] = arguments.days * 86400 if arguments.days else None
        body["limits"] = dict(arguments.limit) or None
        say(f"shown this once:  {ask('POST', '/keys', json=body)['secret']}")
    else:
        ask("DELETE", f"/keys/{quote(arguments.key_id, safe='')}")


def _limit(text: str) -> tuple[str, float]:
    """Return name and amount of `NAME=N`."""
    name, _, amount = text.partition("=")
    if name not in LIMITS:
        raise argparse.ArgumentTypeError(f"there is no limit {name!r}; known are {', '.join(LIMITS)}")
    return name, float(amount)


def _until(at: float) -> str:
    """Return when a key expires, as a date in UTC."""
    return time.strftime("until %Y-%m-%d", time.gmtime(at))
