"""How many examples a property draws: a part of them in `make test`, all of them in `make test-long`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import settings

F = TypeVar("F")


def drawn(quick: int, full: int) -> int:
    """Return how many examples are drawn under the profile of hypothesis that the command line names."""
    # `search` is for those who look for new examples, and they want many.
    return quick if settings.get_current_profile_name() == "quick" else full


def examples(quick: int, full: int, **more: Any) -> Callable[[F], F]:
    """Make a property draw `quick` examples in `make test`, and run in `make test-long` too, with `full` examples.

    Args:
        quick: number of examples of the first tier.
        full: number of examples of the third tier.
        more: other settings of hypothesis.
    """
    chosen = settings(max_examples=drawn(quick, full), **more)

    def decorate(test: F) -> F:
        return pytest.mark.more_examples(chosen(test))

    return decorate
