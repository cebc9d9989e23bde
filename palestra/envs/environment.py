"""The easy forms of an environment: Gymnasium's five values with text in and out, and one question with one answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import ValidationError

from palestra.envs.rewards import reward_function
from palestra.errors import InvalidEnvironment
from palestra.types.calls import Chat
from palestra.types.messages import ChatMessage, StepReward, text_message

Info = dict[str, Any]
# A text; a picture: an image of Pillow, an array of uint8, bytes of a file; or a list of texts and pictures.
Shown = Any
Reset = tuple[Shown, Info]
Step = tuple[Shown, StepReward, bool, bool, Info]
StepMessage = tuple[Shown | tuple[ChatMessage, ...], StepReward, bool, bool, Info]


class Environment(ABC):
    """The world of one episode, in which one agent acts and the world answers.

    Implement `reset` and `step`, as in Gymnasium. Override `step_message` instead of `step` if your world needs tool
    calls, or sends more than text. For several agents, or observations at any time, see `ConcurrentEnvironment`.

    Each method may be an `async def`, which is awaited on the event loop. Other methods run in a thread, unless
    `blocking` is False.
    """

    max_steps: int | None = None  # steps after which the episode is truncated; None: no limit
    forfeit_reward: float = 0.0  # what is earned at most where an action breaks the world; the least that can be earned
    blocking: ClassVar[bool] = True  # True: methods that are not `async` may take long, so they run in threads
    reusable: ClassVar[bool] = False  # True: `reset` may be called again; False: each episode gets a new environment
    system: str | None = None  # system message that the agent's conversation starts with, if any
    tools: tuple[dict[str, Any], ...] = ()  # tools that the agent may call, in OpenAI's shape
    choices: tuple[str, ...] = ()  # texts of which each reply is one: a model can sample nothing else; (): any reply
    gives_choices: bool = False  # whether `choices` are given
    calls: Sequence[Chat] = ()  # model calls of the episode so far; those of the last action too, when `step` begins

    def setup(self) -> Awaitable[None] | None:  # noqa: B027 - optional to override
        """Prepare for the first episode: open connections, start processes. By default empty. May block."""

    def close(self) -> Awaitable[None] | None:  # noqa: B027
        """Release what `setup` acquired. Called after the last episode, even if that failed. May block."""

    @abstractmethod
    def reset(self, task: Mapping[str, Any]) -> Reset | Awaitable[Reset]:
        """Begin an episode.

        The information for people is recorded with the episode (`palestra episodes RUN ID` shows it), up to 4,000
        characters.

        Args:
            task: the job's task; do not change it.

        Returns:
            observation: the first observation, as the agent reads it: a text; a picture, as an image of Pillow, an
                array of uint8 [height, width, 3], or the bytes of a file; or a list of texts and pictures.
            info: information for people; the agent does not see it.
        """

    @abstractmethod
    def step(self, action: str) -> Step | Awaitable[Step]:
        """Execute the agent's action.

        Args:
            action: the text of the agent's reply.

        Returns:
            observation: the next observation, in one of the forms of `reset`.
            reward: the reward of this step, a finite number; None: not scored, so the episode is left out of training.
                Or several rewards by name, `{"right": 1.0, "style": None}`, which the job weighs and adds up, and of
                which None alone was not scored; the steps of an episode are added up by name.
            terminated: whether the episode has ended in the world.
            truncated: whether the episode was cut off, by a limit of steps for instance, before it ended in the world.
            info: information for people; the agent does not see it.

        Raises:
            EnvironmentFailed: the world failed, not the action: the episode is retried, without a reward.
            Exception: any other exception is the agent's loss (`forfeit_reward`), because its action caused it.
        """

    def step_message(self, action: ChatMessage) -> StepMessage | Awaitable[StepMessage]:
        """Execute the agent's action, given its whole message with tool calls.

        By default `step` gets the message's text.

        Args:
            action: the agent's reply.

        Returns:
            The five values of `step`; the observation may also be a tuple of messages.
        """
        return self.step(action.text)


Prompt = str | Sequence[Any]
"""A question: a text, or a conversation: messages in OpenAI's shape, of which the last is not the model's."""


_SCALARS = (str, int, float)


def task_prompt(task: Mapping[str, Any]) -> Prompt:
    """Return the task's key `prompt`, the default question of a task."""
    if "prompt" not in task:
        raise InvalidEnvironment(f"the task has no key `prompt`; it has {', '.join(map(repr, task))}")
    prompt = task["prompt"]
    if isinstance(prompt, _SCALARS):
        return str(prompt)
    return prompt_messages(prompt)


def prompt_messages(prompt: Any) -> tuple[ChatMessage, ...]:
    """Return a question as messages."""
    if isinstance(prompt, str):
        return (text_message("user", prompt),)
    if not isinstance(prompt, Sequence) or not prompt:
        raise InvalidEnvironment(
            f"the task's `prompt` has the type {type(prompt).__name__}; give a text, or a list of messages such as "
            '[{"role": "user", "content": "…"}]'
        )
    try:
        messages = tuple(map(ChatMessage.model_validate, prompt))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise InvalidEnvironment(f"the task's `prompt` has no messages: {place}: {first['msg']}"[:300]) from None
    if messages[-1].role == "assistant":
        raise InvalidEnvironment(
            "the task's `prompt` ends with a message of the assistant; leave it out: the model says what comes next"
        )
    return messages


class TaskEnvironment(Environment):
    """An environment that asks one question and ends after the first answer, which `reward_fn` scores."""

    def __init__(
        self,
        reward_fn: Callable[..., Any] | Mapping[str, Callable[..., Any]],
        prompt: Callable[[Mapping[str, Any]], Prompt] = task_prompt,
    ) -> None:
        """Create the environment.

        Args:
            reward_fn: `(task, answer) -> reward`, or a function in TRL's form, sync or async; or several, by name. Each
                may have parameters for facts about the reply, such as `finish_reason`; see `reward_facts`.
            prompt: returns the question of a task: a text, or a conversation, whose system message replaces the job's.
        """
        self._reward, self._prompt = reward_function(reward_fn), prompt
        self._task: Mapping[str, Any] = {}

    def reset(self, task: Mapping[str, Any]) -> Reset:
        """Return the task's question as the first observation."""
        self._task = task
        asked = self._prompt(task)
        return asked if isinstance(asked, str) else prompt_messages(asked), {}

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Score the answer with the reward function and end the episode."""
        reward = self._reward(self._task, action, self.calls)
        return _last(reward) if isinstance(reward, float | Mapping) else _last_of(reward)


async def _last_of(reward: Awaitable[StepReward]) -> Step:
    return _last(await reward)


def _last(reward: StepReward) -> Step:
    return "", reward, True, False, {}
