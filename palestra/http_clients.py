"""The certificates that connections to other servers trust."""

from __future__ import annotations

import functools
import ssl


@functools.cache
def trusted() -> ssl.SSLContext:
    """Return the system's certificates; reading them takes longer than a request, so that is done once."""
    return ssl.create_default_context()
