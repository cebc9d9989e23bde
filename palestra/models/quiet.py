"""Transformers without progress bars, code of a model's folder, pickles and tracebacks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from palestra.errors import ModelError, PalestraError


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide transformers' progress bars in the block, because they would break the command's own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


# What is given to every `from_pretrained` and `from_config` of transformers' Auto classes. A model's folder may be
# anybody's: no code of it is run, and weights, but for GGUF, are read from safetensors, which can't have any (a pickle
# can).
NO_CODE: dict[str, Any] = {"trust_remote_code": False}
NO_PICKLE: dict[str, Any] = NO_CODE | {"use_safetensors": True}


@contextlib.contextmanager
def as_model_error(what: str) -> Iterator[None]:
    """Turn any error of transformers about a model's files into one line; out-of-memory errors pass through. `what`
    says what failed, such as "model 'x' cannot be loaded".
    """
    try:
        yield
    except (PalestraError, MemoryError):
        raise
    except Exception as error:
        # That of torch, which need not be loaded here, and that of its allocator for CPUs.
        if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error):
            raise
        lines = str(error).splitlines() or [""]
        said = lines[0] if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {lines[0]}"
        raise ModelError(f"{what}: {said}") from error
