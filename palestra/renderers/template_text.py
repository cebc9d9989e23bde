"""The text that a model's chat template makes of a conversation, in bounded time: a template may be anybody's."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from palestra.errors import ModelError

TEMPLATE_SECONDS = 5.0


class _Endless(Exception):
    """The time of a template is over."""


def template_text(tokenizer: Any, messages: Any, **options: Any) -> Any:
    """Return the result of a tokenizer's `apply_chat_template`.

    Raises:
        ModelError: the template is broken, recurses endlessly, or takes longer than TEMPLATE_SECONDS.
        TemplateError, TypeError, ValueError: it refuses the conversation.
    """
    try:
        with _limited(TEMPLATE_SECONDS):
            return tokenizer.apply_chat_template(messages, **options)
    except _Endless:
        raise ModelError(f"the chat template of the model takes longer than {TEMPLATE_SECONDS:g} s") from None
    except (ArithmeticError, RecursionError, MemoryError, LookupError, AttributeError) as error:
        name = type(error).__name__
        raise ModelError(f"the chat template of the model has a defect: {name}: {error}") from None


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise `_Endless` in this thread, between two steps of Python, when the block takes longer."""
    thread, lock, ended = threading.get_ident(), threading.Lock(), False

    def end() -> None:
        with lock:
            if not ended:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Endless))

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            ended = True
        timer.cancel()
