"""Addresses from which no picture is fetched, whatever a name leads to."""

from __future__ import annotations

import pytest

from palestra.server.picture_fetch import is_public


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_addresses_of_the_internet_are_public(address):
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "::1",
        "fe80::1%lo",
        "fd00::1",
        "fec0::1",  # site-local, which Python calls global
        "::127.0.0.1",  # IPv4 in IPv6, in all its forms
        "::ffff:127.0.0.1",
        "::ffff:0:127.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b:1::7f00:1",
        "2002:7f00:1::",
        "ff02::1",
    ],
)
def test_other_addresses_are_not(address):
    assert not is_public(address)
