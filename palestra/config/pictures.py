"""Settings of pictures: how large they may be, how much of the disk they take, and the hosts they are fetched from."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from palestra.config.section import Positive, Seconds, Section

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9]([a-z0-9.-]*[a-z0-9])?)(:[0-9]{1,5})?", re.ASCII)


class PicturesConfig(Section):
    """Pictures in messages: their limits, and the hosts from which URLs are fetched."""

    max_bytes: Positive = Field(4 * 2**20, description="Longest file of a picture. Longer ones are refused.")
    max_pixels: Positive = Field(
        4096 * 2304, description="Width times height of a picture; it is read from the file before it is decoded."
    )
    max_in_call: Positive = Field(100, description="Most pictures in the messages of one call.")
    max_bytes_in_episode: Positive = Field(
        2**30,
        description="Most bytes of pictures that one attempt at an episode may add to those of the run by its key; "
        "pictures that the run has already cost nothing. More are refused.",
    )
    store_gib: float = Field(
        20.0, gt=0, description="Most that the pictures of the run take on disk, each counted once. More are refused."
    )
    hosts: list[str] = Field(
        [],
        description="Hosts, or `host:port`, whose http and https URLs may stand in messages; the server fetches them. "
        "[]: a URL is refused. A name that leads to a private address is refused, too.",
    )
    private_hosts: list[str] = Field(
        [], description="As `hosts`, of this machine or a private network: their addresses are not looked at."
    )
    fetch_seconds: Seconds = Field(10.0, description="Longest time in which a URL has to be fetched.")

    @field_validator("hosts", "private_hosts")
    @classmethod
    def _are_hosts(cls, hosts: list[str]) -> list[str]:
        lowered = [host.lower() for host in hosts]
        for host in lowered:
            if _HOST.fullmatch(host) is None:
                raise ValueError(f"{host!r} is no host, as images.example.com, or 10.0.0.7:8080")
        return lowered
