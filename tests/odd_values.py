"""Bodies of requests in which anything is changed, and a log that has no error."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

NUMBERS = [0, -1, 2**31, 2**63, 2**64, 10**30, -(10**400), 0.5, 1e999, float("nan")]
TEXTS = ["", "\ud800", "\0", "..", "/", "<|im_end|>", "auto", "policy", "x" * 20_000, "{", "</tool_call>"]
DEEP: Any = []
for _ in range(900):  # deeper than Python's own stack lets a server walk it by recursion
    DEEP = [DEEP]
odd = st.one_of(st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5), st.sampled_from([*NUMBERS, *TEXTS]))
anything = st.one_of(
    st.recursive(
        st.one_of(st.none(), st.booleans(), odd),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
        max_leaves=6,
    ),
    st.just(DEEP),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(body: Any, path: tuple[Any, ...], new: Any, drop: bool) -> Any:
    if not path:
        return new
    body = copy.deepcopy(body)
    place = body
    for key in path[:-1]:
        place = place[key]
    if drop:
        del place[path[-1]]
    else:
        place[path[-1]] = new
    return body


@st.composite
def odd_bodies(draw: Any, body: Any, times: int = 2) -> Any:
    """A body in which one or two values are others, or are missing."""
    for _ in range(draw(st.integers(1, times))):
        place = draw(st.sampled_from(list(places(body))))
        body = changed(body, place, draw(anything), draw(st.booleans()) and bool(place))
    return body


def written(body: Any) -> bytes:
    """JSON as Python writes it: with NaN, and lone surrogates as escapes."""
    return json.dumps(body).encode()


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextlib.contextmanager
def quiet_log() -> Iterator[None]:
    """Fail if an error is logged inside of the block: what a client sends may not fill the log."""
    handler, loggers = _Kept(), [logging.getLogger(name) for name in ("palestra", "uvicorn", "asyncio", "websockets")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    assert not [one.getMessage() for one in handler.records]
