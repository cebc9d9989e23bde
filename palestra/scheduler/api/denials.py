"""Denials in the audit log: of changes that a key does not allow, or to what its user can't see."""

from __future__ import annotations

import logging
from collections import Counter

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from palestra.errors import Forbidden, NotFound, PalestraError, StoreError, TooManyRequests
from palestra.scheduler.api.access import ControlPlane
from palestra.scheduler.identity import Identity
from palestra.scheduler.limits import KeyLimits, RequestRates
from palestra.scheduler.permissions import Action

log = logging.getLogger("palestra.scheduler")
WRITTEN = KeyLimits(requests_per_minute=6, burst=20)  # lines of one key; those between are counted in the next
READING = ("GET", "HEAD", "OPTIONS")


class Denials:
    """Writes denials into the audit log, but not so many that it is full of them."""

    def __init__(self, plane: ControlPlane) -> None:
        self._store, self._rates = plane.store, RequestRates(plane.store.clock)
        self._left_out: Counter[str] = Counter()  # by key, since its last line

    async def note(self, by: Identity, action: Action, target: str, error: PalestraError) -> None:
        """Write one denial, or count it where the key has had too many.

        Args:
            by: who was denied.
            action: what they asked for.
            target: method and path.
            error: what they were answered.
        """
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
        except StoreError as failure:  # the denial is answered even where it can't be written down
            log.warning("a denial of %s to %s could not be written down: %s", action, by.user, failure)


def note_denials(app: FastAPI, plane: ControlPlane) -> None:
    """Have the application write down what it denies; its answers stay as they are."""
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
