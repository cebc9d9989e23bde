"""Write denials to the audit log: refused changes, and requests for objects that the user can't see."""

from __future__ import annotations

import logging
from collections import Counter

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from palestra.control.accounts.identity import Identity
from palestra.control.api.access import ControlPlane
from palestra.control.rights.limits import KeyLimits, RequestRates
from palestra.control.rights.permissions import Action
from palestra.errors import Forbidden, NotFound, PalestraError, StoreError, TooManyRequests

log = logging.getLogger("palestra.control")
WRITTEN = KeyLimits(requests_per_minute=6, burst=20)  # lines of one key; the next line counts those left out
READING = ("GET", "HEAD", "OPTIONS")


class Denials:
    """Writes denials to the audit log, with a limit for each key, so that one client can't fill the log."""

    def __init__(self, plane: ControlPlane) -> None:
        self._store, self._rates = plane.store, RequestRates(plane.store.clock)
        self._left_out: Counter[str] = Counter()  # denials of a key since its last line

    async def note(self, by: Identity, action: Action, target: str, error: PalestraError) -> None:
        """Write one denial, or only count it if the key has had too many."""
        key = by.key_id or ""
        try:
            self._rates.count(key, WRITTEN)
        except TooManyRequests:
            self._left_out[key] += 1
            return
        more = self._left_out.pop(key, 0)
        outcome = f"{error.code}, and {more} denials before it" if more else error.code
        try:
            await self._store.append_audit(by.tenant, by.user, by.key_id, action.value, target, outcome)
        except StoreError as failure:  # the denial is answered even if it can't be recorded
            log.warning("a denial of %s to %s could not be written down: %s", action, by.user, failure)


def note_denials(app: FastAPI, plane: ControlPlane) -> None:
    """Make the application write what it denies to the audit log; its answers do not change."""
    denials, answer = Denials(plane), app.exception_handlers[PalestraError]

    async def denied(request: Request, error: Exception) -> Response:
        asked = getattr(request.state, "asked", None)  # (identity, action); None: the request had no good key
        if asked is not None and isinstance(error, PalestraError) and request.method not in READING:
            by, action = asked
            await denials.note(by, action, f"{request.method} {request.url.path}", error)
        response: Response = await answer(request, error)  # type: ignore[misc]  # ours is asynchronous
        return response

    app.add_exception_handler(Forbidden, denied)
    app.add_exception_handler(NotFound, denied)
