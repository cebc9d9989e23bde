"""Who may see the page: how a browser gets its key, and where it is checked."""

from __future__ import annotations

import hmac
import secrets
from typing import Protocol

from starlette.requests import Request

from palestra.errors import Unauthorized
from palestra.http.guard import bearer


class PageAccess(Protocol):
    """Authorizes requests of the page; the routes know no keys."""

    def check(self, request: Request) -> None:
        """Check that a request may read the runs. Raises Unauthorized or Forbidden if it may not."""
        ...

    def exchange(self, request: Request) -> str:
        """Return the viewer's key for a browser's one-time code, or for a key with more rights. Raises Unauthorized or
        Forbidden if it has nothing that is good for that.
        """
        ...

    def talk(self, request: Request) -> str | None:
        """Return the key with which a browser may call the policies; None: no engine runs, or it may only read."""
        ...


class OneTimeLink:
    """Access to a page of `palestra dashboard`: a one-time code, exchanged for a key that is valid as long as the page.

    The code is in the link's fragment (`#`), which browsers neither send nor log; the key is never in an address.
    """

    def __init__(self) -> None:
        self._key = f"pv-{secrets.token_hex(20)}"
        self._code: str | None = None
        self.renew()

    @property
    def code(self) -> str | None:
        """Return the link's code; None: it has been used."""
        return self._code

    def renew(self) -> None:
        """Generate a new code; the old one becomes invalid."""
        self._code = f"once-{secrets.token_hex(20)}"

    def check(self, request: Request) -> None:
        """Check the viewer's key; see `PageAccess`."""
        if not hmac.compare_digest((bearer(request) or "").encode(), self._key.encode()):
            raise Unauthorized("no key, or the key of a page that has ended; open the link that was printed")

    def exchange(self, request: Request) -> str:
        """Return the viewer's key for the one-time code, or for itself; see `PageAccess`."""
        given = (bearer(request) or "").encode()
        if self._code is not None and hmac.compare_digest(given, self._code.encode()):
            self._code = None
            return self._key
        if hmac.compare_digest(given, self._key.encode()):
            return self._key
        raise Unauthorized("the link was used already, or is of another page; press Enter where it runs for a new one")

    def talk(self, request: Request) -> None:
        """Return None, because runs in folders have no engine; see `PageAccess`."""
        return None
