"""Every error that Palestra raises on purpose.

`http_status` is what the API answers with; `retryable` says whether the same request may succeed later.
"""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from pathlib import Path
from typing import ClassVar

# The folders of Python itself, of installed packages and of Palestra, by which `place_of` knows a user's own code.
_OWN = Path(__file__).parent.resolve()  # next to it are `palestra_inspect` and the others
_INSTALLED = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")]
_NOT_THE_USERS = (f"{_OWN}_", *(f"{place}/" for place in (_OWN, *map(os.path.realpath, _INSTALLED))))


class PalestraError(Exception):
    """Base of every error that Palestra raises on purpose, with its HTTP answer.

    Catch it to handle all of them; any other exception is a bug, or an error of your own code.

    Attributes:
        http_status: of an API answer that reports the error.
        retryable: whether the same request may succeed later, so that clients retry it.
        exit_code: of a command that this error ends.
        code: stable name of the error in API answers, for programs.
    """

    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 2

    @property
    def code(self) -> str:
        """Return the error's name in snake case, such as `episode_lease_expired`.

        Names are stable, so programs may compare them.
        """
        name = type(self).__name__
        return "".join("_" + c.lower() if c.isupper() and i else c.lower() for i, c in enumerate(name))


class InvalidRequest(PalestraError):
    """The body of a request is invalid, or a value in it is out of range.

    Attributes:
        field: path of the wrong field, such as `messages.0.content`; None: no single field.
    """

    http_status = 422

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class UnsupportedField(InvalidRequest):
    """A field of a provider's API has a value that this server does not implement; leave the field out."""

    http_status = 400


class CallsRefused(InvalidRequest):
    """Every model call of an episode was refused, so that its reward would say nothing of the policy; abort it."""

    http_status = 400


class ProtocolMismatch(InvalidRequest):
    """The two sides of the environment protocol have no common version; update the older one."""

    http_status = 400


class ControlTokenInText(InvalidRequest):
    """The text of a message spells a control token of the model, which its renderer cannot write as text.

    Attributes:
        token: the control token's text.
    """

    http_status = 400

    def __init__(self, where: str, token: str) -> None:
        super().__init__(
            f"{where} contains the text {token}, which is a control token of this model, and its renderer can't write "
            "it as text; put a space into it, or take it out"
        )
        self.where = where
        self.token = token


class GrammarRefused(InvalidRequest):
    """A grammar needs more time or memory than one grammar may.

    Simplify the schema.
    """

    http_status = 400

    def __init__(self, message: str, field: str | None = None, lasting: bool = True) -> None:
        """Create the error.

        Args:
            field: path of the request's field with the grammar, if known.
            lasting: whether another machine would refuse the grammar too. A refusal for time is not lasting, because
                the machine may have been busy.
        """
        super().__init__(message, field)
        self.lasting = lasting

    def of_field(self, field: str) -> GrammarRefused:
        """Return the error for a request with the grammar in `field`, with the advice to simplify it."""
        return GrammarRefused(f"{field}: over the bound of a grammar: {self}; simplify it", field, self.lasting)


class ContextOverflow(PalestraError):
    """Prompt and reply together exceed the model's context; shorten the messages or raise `max_context`.

    Attributes:
        prompt_tokens: length of the prompt, or a lower bound.
        max_context: longest prompt and reply together, in tokens.
    """

    http_status = 400

    def __init__(
        self, prompt_tokens: int, max_context: int, at_least: bool = False, pictures: tuple[int, int] = (0, 0)
    ) -> None:
        """Create the error.

        Args:
            prompt_tokens: length of the prompt in tokens.
            max_context: longest prompt and reply together, in tokens.
            at_least: whether `prompt_tokens` is a lower bound, because tokenisation stopped at the limit.
            pictures: their number, and the number of their placeholder tokens.
        """
        number, placeholders = pictures
        shown = f"{number} pictures have {placeholders} of the tokens; leave some out, " if number else ""
        super().__init__(
            f"the prompt has {'at least ' if at_least else ''}{prompt_tokens} tokens and the context of this policy is "
            f"{max_context}; {shown}shorten the messages, or raise max_context of the policy"
        )
        self.prompt_tokens = prompt_tokens
        self.max_context = max_context

    @classmethod
    def of_message(cls, message: str) -> ContextOverflow:
        """Return the error for a message from a server."""
        found = re.match(r"the prompt has (at least )?(\d+) tokens and the context of this policy is (\d+);", message)
        if found is None:
            raise ValueError(f"no message of a full context: {message}")
        return cls(int(found[2]), int(found[3]), at_least=found[1] is not None)


class ConfigError(PalestraError):
    """A job's configuration is wrong: a value is out of range, or conflicts with other values or this machine."""

    http_status = 400


class RunInUse(ConfigError):
    """Another process is running the job, and holds the lock on its run folder; stop that process first."""


class OutOfMemory(ConfigError):
    """The models of a job do not fit into the free memory; other processes may release theirs."""

    http_status = 503
    retryable = True


class Unauthorized(PalestraError):
    """A request has no key, or an unknown one."""

    http_status = 401


class Forbidden(PalestraError):
    """The key is valid, but not for this route: it is an episode's key, for example, or its user is no admin."""

    http_status = 403


class NotFound(PalestraError):
    """The episode, job, policy or file does not exist, or is invisible to the caller's key."""

    http_status = 404


class Conflict(PalestraError):
    """The present state of a job, an episode or a group does not allow the request.

    A retry does not change that.
    """

    http_status = 409


class JobOver(Conflict):
    """The job has ended, and its data plane with it, so that a client cannot connect."""


class IllegalTransition(Conflict):
    """A state change that the lifecycle's table in `types/states.py` does not allow."""


class ClaimOver(Conflict):
    """A claim was repeated after its lease had ended or its episode was finished.

    Claim again with another request id.
    """


class HistoryDrift(Conflict):
    """With `rollout.changed_history = 'refuse'`: a call would lose exact tokens of the earlier call that it continues.

    Attributes:
        position: first different token.
    """

    def __init__(self, reason: str, call: int | None, message: int, position: int) -> None:
        left = "an earlier call" if call is None else f"call {call}"
        super().__init__(
            f"these messages do not go on from the exact tokens of {left}: {reason.replace('_', ' ')}; the first "
            f"difference is in message {message}, at token {position}. Send the earlier messages as they were, or set "
            "rollout.changed_history = 'fork'"
        )
        self.reason = reason
        self.position = position


class EpisodeLeaseExpired(Conflict):
    """The caller no longer holds the episode: its lease expired without a heartbeat, or was given to another worker."""


class EpisodeEnded(Conflict):
    """The episode is completed or discarded; no call and no reward can be added to it."""


class EpisodeOver(Conflict):
    """An action was sent to a concurrent environment whose episode is over."""


class Expired(PalestraError):
    """The result of a request was kept for a limited time, which has passed."""

    http_status = 410


class PayloadTooLarge(PalestraError):
    """The body of the request, or the configuration in it, has more bytes than the limit allows."""

    http_status = 413


class TooManyRequests(PalestraError):
    """Too many requests wait for the same resource, or a key has exceeded its rate.

    Attributes:
        retry_after_seconds: when to retry; answers have it as `Retry-After`.
    """

    http_status = 429
    retryable = True

    def __init__(self, message: str, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class ServerStopping(PalestraError):
    """The server is shutting down, so it accepts no more work. It may return under the same address."""

    http_status = 503
    retryable = True


class EngineFailure(PalestraError):
    """The engine could not finish a call. The reply must not be used; the call may be retried."""

    http_status = 503
    retryable = True


class ReplyLost(EngineFailure):
    """A reply was partly lost, and resampling did not repeat the tokens that its caller has.

    A caller that has not passed on any of them may begin again; the whole reply then comes from one attempt.
    """


class EngineServerError(EngineFailure):
    """A server of an engine has reported that it failed. It is alive, and may be asked again."""


class EngineKeyRefused(EngineFailure):
    """A server of the engine requires another key; a retry does not help."""

    http_status = 500
    retryable = False


class BaseServerLost(EngineFailure):
    """The connection to a base server was lost, or the restarted server has forgotten the job.

    The job begins again from its newest checkpoint.
    """


class TrainerLost(PalestraError):
    """A process of a trainer has died or stopped, and the others were ended.

    The job begins again from its newest checkpoint.
    """

    http_status = 503
    retryable = True


class ConnectionLost(PalestraError):
    """The server was unreachable for longer than the client's `retry_seconds`."""

    http_status = 503
    retryable = True


class TeacherFailed(PalestraError):
    """The teacher's server could not be reached, or its answer is invalid. The weights are as before the step."""

    http_status = 503
    retryable = True


class JudgeFailed(PalestraError):
    """A judge gave no verdict, or none that can be used: what it was asked about has no reward, and never 0."""

    http_status = 503
    retryable = True


class VersionQuarantined(Conflict):
    """An audit has found that the reward is gamed, and holds versions of a policy back.

    They answer no call outside the job's own episodes, and are exported only with `--force`.
    """


class BudgetSpent(PalestraError):
    """A call does not fit into the job's `budget` any more. Raise it and resume to continue."""

    http_status = 402


class JudgeUnavailable(PalestraError):
    """A judge could not be asked for a long time: the job ends without discarding an episode; resumed, it goes on."""


class InvalidEnvironment(PalestraError):
    """An environment breaks the rules of `Environment`: a method returned a wrong type, for example.

    The message names the rule.
    """


class InvalidAlgorithm(PalestraError):
    """An algorithm or a loss breaks the rules of `Algorithm` or `Loss`: a loss is not a number, for example.

    The message names the rule and the episodes of affected rows.
    """


class InvalidSampler(PalestraError):
    """A `TaskSampler` is not deterministic, gives too few tasks, or tasks that do not exist."""


class EnvironmentFailed(PalestraError):
    """An environment has failed by its own or its machine's fault: a server is lost, a process was killed.

    The attempt at the episode has no reward, and the episode is retried. Raise it in your own environment if no action
    of an agent can have caused the failure. Every other exception of an environment after an agent's action is a
    forfeit.
    """


class RewardFailed(EnvironmentFailed):
    """A reward function raised an exception, its `__cause__`. The reward is unknown, so the episode has none."""


class EpisodeForfeited(PalestraError):
    """An agent's action has ended, broken or hung an environment: the episode ends as that agent's loss.

    The agent earns `forfeit_reward`, or its earlier rewards if these are less. The episode is not retried: otherwise a
    model could void episodes that it is about to lose. A rollout function may raise it as well.

    Attributes:
        reward: what a rollout function pays for it: at most the least that the task can pay.
    """

    def __init__(self, message: str, reward: float = 0.0) -> None:
        super().__init__(message)
        self.reward = reward


class NotScored(PalestraError):
    """A reward is None: the episode is left out of training.

    This is not a failure, and the episode is not retried.
    """


class RolloutFailed(PalestraError):
    """An environment, agent or engine failed in an episode that Palestra played, or its time limit was reached.

    Attributes:
        termination: the reason; see `rollout.Termination`. `__cause__` is the exception of the user's code, if there
            was one.
    """

    def __init__(self, termination: str, message: str) -> None:
        super().__init__(message)
        self.termination = termination


class EpisodesLost(PalestraError):
    """A step cannot be trained: group after group lost its episodes, without rewards or by failures."""


class JobStuck(PalestraError):
    """A training job has made no progress for `watchdog.stuck_seconds`; the message names the stuck part."""


class WorkerCrashLoop(PalestraError):
    """Worker processes die right after their start, so the command gives up."""


class ServerFailed(PalestraError):
    """A model server could not be started, or has died.

    The control plane may restart it, possibly on another node.
    """

    http_status = 503
    retryable = True


class NodeLost(ServerFailed):
    """The node chosen for a model server is dead; the job waits until another node is free."""


class ModelError(PalestraError):
    """The weights of a model are missing, damaged, or of an architecture that Palestra does not support."""


class CheckpointError(PalestraError):
    """No checkpoint of the run can be read, or one cannot be written, because the disk is full, for example."""


class StoreError(PalestraError):
    """A store is damaged, was written by another version of Palestra, or is in use by another process."""


class StoreUnreachable(StoreError):
    """The database does not answer at the moment; a later retry may succeed."""

    http_status = 503
    retryable = True


class Superseded(StoreError):
    """Another control plane has taken over the control store, so this one ends. Its jobs continue
    under the other one.
    """

    http_status = 503
    retryable = True
    exit_code = 3


def place_of(error: BaseException) -> str:
    """Return the innermost line of a user's code in an error's traceback, as " (agent.py:17, in rollout)".

    Frames of Palestra, of Python itself and of installed packages are skipped, because users cannot change them; "": no
    other frame.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        # Packages may also lie outside of this interpreter's own folder (PYTHONPATH, a .pth file, the system's).
        installed = {"site-packages", "dist-packages"} & set(Path(frame.filename).parts)
        if not installed and not frame.filename.startswith(("<", *_NOT_THE_USERS)):
            return f" ({Path(frame.filename).name}:{frame.lineno}, in {frame.name})"
    return ""


def causes_of(error: BaseException) -> list[BaseException]:
    """Return an error and its causes, nearest first."""
    found: list[BaseException] = [error]
    while (following := found[-1].__cause__ or found[-1].__context__) is not None and following not in found:
        found.append(following)
    return found
