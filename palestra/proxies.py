"""Which servers are reached through a proxy: never this machine, others as the environment says.

The variables are `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`; their lower-case forms take precedence.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit
from urllib.request import getproxies

from palestra.errors import ConfigError

_OF_WEBSOCKETS = {"ws": "http", "wss": "https"}  # the scheme whose proxy they use
_KNOWN = ("http", "https", "socks5", "socks5h")
# For the clients of other libraries, of which some know no ranges.
_OWN = ("localhost", "127.0.0.1", "127.0.0.0/8", "::1", "0.0.0.0")


def is_own(host: str) -> bool:
    """Return whether a host is this machine: loopback, any, an address of its network interfaces, or its own name."""
    host = host.lower().strip("[]").rstrip(".").partition("%")[0]
    if host == "localhost" or host.endswith(".localhost") or host == _name():
        return True
    address = _address(host)
    if address is None:
        return False
    if address.is_loopback or address.is_unspecified:
        return True
    with socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as card:
        try:
            card.bind((str(address), 0))
        except OSError:
            return False
    return True


def proxy_of(url: str, environment: Mapping[str, str] | None = None) -> str | None:
    """Return the URL of a server's proxy; None: direct.

    Args:
        url: http, https, ws or wss.
        environment: proxies by scheme, as from `urllib.request.getproxies`; None: this process's.
    """
    proxies = getproxies() if environment is None else environment
    parts = urlsplit(url)
    found = proxies.get(_OF_WEBSOCKETS.get(parts.scheme, parts.scheme)) or proxies.get("all")
    if not found or parts.hostname is None or is_own(parts.hostname):
        return None
    if _is_excepted(parts.hostname, parts.port, proxies.get("no", "")):
        return None
    proxy = found if "://" in found else f"http://{found}"
    try:
        known = urlsplit(proxy).scheme.lower() in _KNOWN and urlsplit(proxy).hostname and urlsplit(proxy).port != 0
    except ValueError:  # of the port
        known = False
    if not known:
        raise ConfigError(f"{parts.hostname} can't be asked{proxy_note(proxy)}: that is no URL of a proxy")
    return proxy


def through_proxy(url: str) -> str:
    """Return the end of a message about a wrong answer that may come from a proxy; "": no proxy."""
    proxy = proxy_of(url)
    return "" if proxy is None else proxy_note(proxy)


def proxy_note(proxy: str) -> str:
    """Return the part of a message that names a proxy, without its password, and its variable."""
    scheme, _, rest = proxy.partition("://")
    return f" through the proxy {scheme}://{rest.rpartition('@')[2]} (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY)"


def spare_own_addresses() -> None:
    """Add this machine to `NO_PROXY`, so that other libraries here, and in child processes, reach it directly."""
    proxies = getproxies()
    excepted = [entry for part in proxies.get("no", "").split(",") if (entry := part.strip())]
    if not any(proxies.get(scheme) for scheme in ("http", "https", "all")) or "*" in excepted:
        return
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(dict.fromkeys([*excepted, *_OWN, _name()]))


def _name() -> str:
    return socket.gethostname().lower().rstrip(".")


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return a host's address, including short forms such as 127.1; None: it is a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            return ipaddress.IPv4Address(socket.inet_aton(host))
        except (OSError, UnicodeError):
            return None
    return getattr(address, "ipv4_mapped", None) or address


def _is_excepted(host: str, port: int | None, entries: str) -> bool:
    """Return whether `NO_PROXY` lists a host: by its name or a domain, an address or a range, perhaps with a port."""
    address, host = _address(host), host.lower().rstrip(".")
    for entry in filter(None, (entry.strip().lower() for entry in entries.split(","))):
        if entry == "*":
            return True
        try:
            network = ipaddress.ip_network(entry.strip("[]"), strict=False)
        except ValueError:
            name, _, after = entry.rpartition(":")
            if after.isdecimal() and name:
                if int(after) != port:
                    continue
                entry = name
            domain = entry.strip("[]").removeprefix("*").removeprefix(".")
            if domain and (host == domain or host.endswith(f".{domain}")):
                return True
        else:
            if address is not None and address in network:
                return True
    return False
