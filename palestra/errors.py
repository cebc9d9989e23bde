"""Every error that Palestra raises on purpose.

    PalestraError                    500
    ├── InvalidRequest               422  the body, or a value in it, can't be used
    │   ├── UnsupportedField         400  a field of the OpenAI API that is not supported here
    │   ├── ControlTokenInText       400  a message spells a control token, and this model's renderer can't write it
    │   └── GrammarRefused           400  a schema that takes too much time or memory
    ├── ContextOverflow              400  prompt and reply do not fit into the model's context
    ├── ConfigError                  400  a job's configuration is wrong
    │   └── RunInUse                 400  another process is running the job
    ├── Unauthorized                 401  no key, or one that is not known
    ├── Forbidden                    403  a key that opens something else
    ├── NotFound                     404  no such episode, job, policy or file
    ├── Conflict                     409  not possible in the present state
    │   ├── JobOver                  409  a job has ended, so it has no data plane any more (raised by the client)
    │   ├── ClaimOver                409  a claim that was sent again is no longer the newest of its episode
    │   ├── IllegalTransition        409  a lifecycle does not allow this move
    │   ├── HistoryDrift             409  exact tokens of an earlier call would be lost (strict mode)
    │   ├── EpisodeLeaseExpired      409  the episode was given to another worker, or its time ran out
    │   ├── EpisodeEnded             409  the episode has ended
    │   └── EpisodeOver              409  an environment has nothing more to show
    ├── PayloadTooLarge              413
    ├── TooManyRequests              429  retry after `retry_after_seconds`
    ├── ServerStopping               503  the server is going down; it may come back
    ├── EngineFailure                503  the engine could not finish a call
    ├── ConnectionLost               503  the server could not be reached (raised by the client)
    ├── EnvironmentMistake       500  an environment does not keep to what environments have to do
    ├── NotScored                500  an episode was given None in the place of a reward
    ├── RolloutFailed            500  an episode that Palestra played itself could not be finished
    ├── WorkersCrash                 500  worker processes die as soon as they are started
    ├── ServerFailed                 503  a model server could not be started
    │   └── MachineGone              503  the machine that was chosen for it is dead
    ├── ModelError                   500  weights are missing or can't be used
    ├── CheckpointError              500  no checkpoint can be read
    └── StoreError                   500  a store is damaged, of another version, or in use
        └── StoreUnreachable         503  the database does not answer at the moment

`http_status` is what the API answers with; `retryable` says whether the same request may succeed later.
"""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from typing import ClassVar

_INSTALLED = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_NOT_THE_USERS = tuple(f"{Path(place).resolve()}/" for place in (str(Path(__file__).parent), *_INSTALLED))


class PalestraError(Exception):
    """Base of all errors. `code` is the stable name used in API answers."""

    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    @property
    def code(self) -> str:
        """The error's name in snake case, e.g. `episode_lease_expired`."""
        name = type(self).__name__
        return "".join("_" + c.lower() if c.isupper() and i else c.lower() for i, c in enumerate(name))


class InvalidRequest(PalestraError):
    """The request can't be understood or a value is out of range."""

    http_status = 422

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class UnsupportedField(InvalidRequest):
    """A field of the OpenAI API which this server does not implement."""

    http_status = 400


class ControlTokenInText(InvalidRequest):
    """The text of a message spells a control token of the model, which its renderer can't write as text."""

    http_status = 400

    def __init__(self, where: str, token: str) -> None:
        super().__init__(
            f"{where} contains the text {token}, which is a control token of this model, and its renderer can't write "
            "it as text; put a space into it, or take it out"
        )
        self.where = where
        self.token = token


class GrammarRefused(InvalidRequest):
    """What a reply would have to match is over a bound: it takes too much time or memory."""

    http_status = 400

    def __init__(self, message: str, field: str | None = None, lasting: bool = True) -> None:
        """`lasting`: whether the same content will be refused on another machine, or at another time, too."""
        super().__init__(message, field)
        self.lasting = lasting

    def of_field(self, field: str) -> GrammarRefused:
        """Return the error as one of a request that asks for the grammar in `field`."""
        return GrammarRefused(f"{field}: over the bound of a grammar: {self}; simplify it", field, self.lasting)


class ContextOverflow(PalestraError):
    """Prompt and reply together are longer than the model's context."""

    http_status = 400

    def __init__(self, prompt_tokens: int, max_context: int, at_least: bool = False) -> None:
        """`at_least`: not all of the prompt was tokenised."""
        super().__init__(
            f"the prompt has {'at least ' if at_least else ''}{prompt_tokens} tokens and the context of this policy is "
            f"{max_context}; shorten the messages, or raise max_context of the policy"
        )
        self.prompt_tokens = prompt_tokens
        self.max_context = max_context


class ConfigError(PalestraError):
    """A job's configuration is wrong."""

    http_status = 400


class RunInUse(ConfigError):
    """Another process is running the job."""


class Unauthorized(PalestraError):
    """No key was sent, or it is not known."""

    http_status = 401


class Forbidden(PalestraError):
    """The key is good, but for something else."""

    http_status = 403


class NotFound(PalestraError):
    """What was named does not exist."""

    http_status = 404


class Conflict(PalestraError):
    """The present state does not allow the request."""

    http_status = 409


class JobOver(Conflict):
    """The job has ended, and its data plane with it."""


class IllegalTransition(Conflict):
    """A lifecycle does not have this move."""


class ClaimOver(Conflict):
    """A claim was sent again after its lease had ended; claim anew, under another request id."""


class HistoryDrift(Conflict):
    """In strict mode: a call would lose exact tokens of an earlier one."""

    def __init__(self, reason: str, call: int | None, message: int, position: int) -> None:
        left = "an earlier call" if call is None else f"call {call}"
        super().__init__(
            f"these messages do not go on from the exact tokens of {left}: {reason.replace('_', ' ')}; the first "
            f"difference is in message {message}, at token {position}. Send the earlier messages as they were, or set "
            "rollout.strict_history = false"
        )
        self.reason = reason
        self.position = position


class EpisodeLeaseExpired(Conflict):
    """The caller no longer holds the episode."""


class EpisodeEnded(Conflict):
    """The episode is over; nothing can be added."""


class EpisodeOver(Conflict):
    """An environment has nothing more to show."""


class PayloadTooLarge(PalestraError):
    """The body is over the limit."""

    http_status = 413


class TooManyRequests(PalestraError):
    """Too many calls are waiting."""

    http_status = 429
    retryable = True

    def __init__(self, message: str, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class ServerStopping(PalestraError):
    """The server is going down."""

    http_status = 503
    retryable = True


class EngineFailure(PalestraError):
    """The engine could not finish a call."""

    http_status = 503
    retryable = True


class ConnectionLost(PalestraError):
    """The server could not be reached for longer than the client was told to try."""

    http_status = 503
    retryable = True


class EnvironmentMistake(PalestraError):
    """An environment does not keep to what environments have to do; the message says how."""


class NotScored(PalestraError):
    """A reward is None: the episode is left out, which is no failure, and it is not played again."""


class RolloutFailed(PalestraError):
    """An environment, an agent or the engine failed during an episode, or its time was over.

    `termination` says which (see `rollout.Termination`); `__cause__` is what was raised, if anything was.
    """

    def __init__(self, termination: str, message: str) -> None:
        super().__init__(message)
        self.termination = termination


class WorkersCrash(PalestraError):
    """Worker processes die as soon as they are started."""


class ServerFailed(PalestraError):
    """A model server could not be started, or is gone."""

    http_status = 503
    retryable = True


class MachineGone(ServerFailed):
    """The machine that was chosen for a model server is dead; its job waits for another one."""


class ModelError(PalestraError):
    """Weights are missing or of a kind that can't be used."""


class CheckpointError(PalestraError):
    """No checkpoint of the run can be read."""


class StoreError(PalestraError):
    """A store is damaged, was written by another version of Palestra, or is in use by another process."""


class StoreUnreachable(StoreError):
    """The database does not answer at the moment."""

    http_status = 503
    retryable = True


def place_of(error: BaseException) -> str:
    """Return the innermost line of a user's code that an error went through, as " (agent.py:17, in rollout)".

    Code of Palestra, of Python itself and of installed packages is none of a user's; empty where there is no other.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        # Packages may also lie outside of this interpreter's own folder (PYTHONPATH, a .pth file, the system's).
        installed = {"site-packages", "dist-packages"} & set(Path(frame.filename).parts)
        if not installed and not frame.filename.startswith(("<", *_NOT_THE_USERS)):
            return f" ({Path(frame.filename).name}:{frame.lineno}, in {frame.name})"
    return ""
