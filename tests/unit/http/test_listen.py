"""Ports: a default that is in use gives way, one that was asked for is refused."""

from __future__ import annotations

import pytest

from palestra.errors import ConfigError
from palestra.http.server import listen


def test_a_default_port_that_is_in_use_gives_way_and_another_is_refused():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with listen("127.0.0.1", port, or_any=True) as other:
            assert other.getsockname()[1] not in (0, port)
        with pytest.raises(ConfigError, match="be listened"):
            listen("127.0.0.1", port)
        with pytest.raises(ConfigError, match="be listened"):
            listen("192.0.2.1", port, or_any=True)  # not an address of this machine
