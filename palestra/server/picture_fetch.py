"""Fetches pictures by URL, only from allowed hosts at public addresses.

The name is resolved once, all its addresses are checked, and the connection uses a checked address, which defeats DNS
rebinding.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import urljoin

import httpx2

from palestra.config import PicturesConfig
from palestra.http_clients import trusted
from palestra.pictures.containers import MAX_PICTURE_BYTES, InvalidPicture
from palestra.proxies import through_proxy

FETCHES = 8  # at the same time
FETCH_SECONDS = 10.0  # of one URL with its redirects: the call waits for it
_HOPS = 3  # redirects that are followed, each to an allowed host
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# All that IANA has given to the internet. Outside of it are site-local addresses, and forms that hold one of IPv4.
_INTERNET = ipaddress.IPv6Network("2000::/3")
Resolve = Callable[[str, int], Awaitable[list[str]]]


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class PictureFetcher:
    """Fetches pictures from allowed hosts, a few at the same time."""

    def __init__(self, config: PicturesConfig, resolve: Resolve = resolve) -> None:
        """Create the fetcher. `config`: has hosts and limits. `resolve`: returns the addresses of a host."""
        self._config, self._resolve = config, resolve
        self._slots = asyncio.Semaphore(FETCHES)

    async def fetch(self, url: str) -> bytes:
        """Return the file of a URL. Raises InvalidPicture: the host is not allowed, has a private address, is too slow,
        answers without a file, or the file is too long.
        """
        try:
            async with asyncio.timeout(FETCH_SECONDS), self._slots:
                for _ in range(_HOPS + 1):
                    found = await self._get(url)
                    if isinstance(found, bytes):
                        return found
                    url = found
        except TimeoutError:
            raise InvalidPicture(f"its URL did not answer within {FETCH_SECONDS:g} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:  # ValueError: of a redirect's URL
            raise InvalidPicture(f"its URL can't be fetched: {type(error).__name__}{_directly(url)}") from error
        raise InvalidPicture(f"its URL leads through more than {_HOPS} redirects")

    async def _get(self, url: str) -> bytes | str:
        """Return the file of a URL, or the target of its redirect."""
        parsed = httpx2.URL(url)
        host, address, port = await self._checked(parsed)
        headers = {"Host": parsed.netloc.decode("ascii"), "Accept": "image/*", "Accept-Encoding": "identity"}
        # The connection goes to the address, and the certificate has to be the name's.
        extensions = {"sni_hostname": host} if parsed.scheme == "https" else {}
        async with httpx2.AsyncClient(trust_env=False, follow_redirects=False, verify=trusted()) as http:
            request = http.build_request(
                "GET", parsed.copy_with(host=address, port=port), headers=headers, extensions=extensions
            )
            answer = await http.send(request, stream=True)
            try:
                if answer.status_code in _REDIRECTS:
                    return urljoin(url, answer.headers.get("location", ""))
                if answer.status_code != 200 or answer.headers.get("content-encoding", "identity") != "identity":
                    raise InvalidPicture(f"its URL answers with the status {answer.status_code}, or compressed")
                pieces, size = [], 0
                async for piece in answer.aiter_raw():
                    size += len(piece)
                    if size > MAX_PICTURE_BYTES:
                        raise InvalidPicture(f"its URL has more than {MAX_PICTURE_BYTES:,} bytes")
                    pieces.append(piece)
                return b"".join(pieces)
            finally:
                await answer.aclose()

    async def _checked(self, url: httpx2.URL) -> tuple[str, str, int]:
        """Return name, address and port of an allowed URL."""
        if url.scheme not in _PORTS or not url.host or url.userinfo:
            raise InvalidPicture("its URL is no http or https URL of a host")
        host, port = url.host.lower().rstrip("."), url.port or _PORTS[url.scheme]
        name = f"[{host}]" if ":" in host else host
        # A host without a port is allowed at the ports of http and https only.
        known = {f"{name}:{port}"} | ({name} if port == _PORTS[url.scheme] else set())
        private = not known.isdisjoint(self._config.private_hosts)
        if not private and known.isdisjoint(self._config.hosts):
            raise InvalidPicture(
                f"its URL is of the host {name}:{port}, from which this job fetches nothing; send the bytes as a data "
                "URL, or name the host in pictures.hosts of the job"
            )
        addresses = await self._resolve(host, port)
        if not addresses or not (private or all(map(is_public, addresses))):
            raise InvalidPicture(f"its URL is of the host {name}, which has no address or a private one")
        return host, addresses[0], port


def _directly(url: str) -> str:
    """Return the end of an error message if a proxy is configured, which would connect to an unchecked address."""
    return "; pictures are fetched without the proxy of the environment" if through_proxy(url) else ""


def is_public(text: str) -> bool:
    """Return whether an address is public, also if it embeds another one (IPv6 with IPv4)."""
    address = ipaddress.ip_address(text.partition("%")[0])
    inner: list[ipaddress.IPv4Address | None] = []
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _NAT64:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
    plain = [part for part in inner if part is not None]
    if plain:
        return all(part.is_global and not part.is_multicast for part in plain)
    if isinstance(address, ipaddress.IPv6Address) and address not in _INTERNET:
        return False
    return address.is_global and not address.is_multicast
