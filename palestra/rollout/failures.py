"""Errors of an episode by the component that failed: the environment, an agent, or the engine."""

from __future__ import annotations

from palestra.errors import (
    ConnectionLost,
    ContextOverflow,
    EngineFailure,
    EpisodeEnded,
    EpisodeForfeited,
    EpisodeLeaseExpired,
    EpisodeOver,
    NotScored,
    PalestraError,
    RewardFailed,
    RolloutFailed,
    ServerStopping,
    place_of,
)
from palestra.rollout.result import Termination

Lost = (EpisodeLeaseExpired, EpisodeEnded)  # the episode does not belong to this runner any more


class classify_errors:
    """Context manager that turns an exception into `RolloutFailed`, which names the failed component.

    Exceptions that end an episode regularly (`EpisodeOver`, `ContextOverflow`, `NotScored`) pass unchanged. After an
    agent's action, any exception that Palestra does not raise on purpose is a forfeit, because the action may have
    caused it. `EnvironmentFailed` means that the environment itself failed.
    """

    __slots__ = ("_acted", "_termination")

    def __init__(self, termination: Termination, *, acted: bool = False) -> None:
        self._termination, self._acted = termination, acted

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or not isinstance(error, Exception):
            return
        if isinstance(error, (EpisodeOver, ContextOverflow, NotScored, RolloutFailed, *Lost)):
            return
        if self._acted and isinstance(error, EpisodeForfeited):
            return
        if self._acted and not isinstance(error, PalestraError):
            raise EpisodeForfeited(said(error)) from error
        if isinstance(error, RewardFailed) and isinstance(error.__cause__, Exception):
            error = error.__cause__
        lost = isinstance(error, EngineFailure | ServerStopping | ConnectionLost)
        whose = Termination.ENGINE_FAILED if lost else self._termination
        raise RolloutFailed(whose, said(error)) from error


def said(error: Exception) -> str:
    """Return an error as one line with its type and position."""
    return f"{type(error).__name__}: {error}{place_of(error)}"
