"""Who may see the page: how a browser gets its key, and where it is checked."""

from __future__ import annotations

import hmac
import secrets
from typing import Protocol

from starlette.requests import Request

from palestra.errors import Unauthorized
from palestra.http.guard import bearer


class PageAccess(Protocol):
    """Checks requests of the page; the routes know no keys."""

    def check(self, request: Request) -> None:
        """Check that a request may see the runs.

        Raises:
            Unauthorized, Forbidden: it may not.
        """
        ...

    def exchange(self, request: Request) -> str:
        """Return the viewer's key for what a browser has: a one-time code, or a key that opens more.

        Raises:
            Unauthorized, Forbidden: it has nothing that is good for that.
        """
        ...

    def talk(self, request: Request) -> str | None:
        """Return the key with which a browser may call the policies; None: no engine runs, or it may only look.

        Args:
            request: one that `exchange` has answered.
        """
        ...


class OneTimeLink:
    """The access to a page of `palestra dashboard`: a code that is good once, for a key that lives as long as the page.

    The code stands behind the `#` of a link, which browsers do not send and do not log; the key is never in an address.
    """

    def __init__(self) -> None:
        """Draw a code and a key."""
        self._key = f"pv-{secrets.token_hex(20)}"
        self._code: str | None = None
        self.renew()

    @property
    def code(self) -> str | None:
        """Return the code of the link; None: it has been used."""
        return self._code

    def renew(self) -> None:
        """Draw a new code; the old one opens nothing any more."""
        self._code = f"once-{secrets.token_hex(20)}"

    def check(self, request: Request) -> None:
        """Check the viewer's key; see `PageAccess`."""
        if not hmac.compare_digest((bearer(request) or "").encode(), self._key.encode()):
            raise Unauthorized("no key, or the key of a page that has ended; open the link that was printed")

    def exchange(self, request: Request) -> str:
        """Return the viewer's key for the code, once, or for itself; see `PageAccess`."""
        given = (bearer(request) or "").encode()
        if self._code is not None and hmac.compare_digest(given, self._code.encode()):
            self._code = None
            return self._key
        if hmac.compare_digest(given, self._key.encode()):
            return self._key
        raise Unauthorized("the link was used already, or is of another page; press Enter where it runs for a new one")

    def talk(self, request: Request) -> None:
        """Return None, because no engine runs beside runs in folders; see `PageAccess`."""
        return None
