"""Exact probabilities of replies that are held to choices: a model's policy, read off without playing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from palestra.algorithms.base import ForwardOutput
from palestra.config import TrainerConfig
from palestra.errors import ConfigError
from palestra.renderers import Renderer
from palestra.renderers.base import ReplyForm
from palestra.runtime.run_dir import weights_of_run
from palestra.types.calls import GrammarSpan, Ids
from palestra.types.messages import ChatMessage, text_message
from palestra.types.records import TrainSample

if TYPE_CHECKING:
    from palestra.trainer.torch_policy import TorchPolicy

MOST_REPLIES = 4096  # of one question, token by token


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceQuestion:
    """A conversation for the model to continue, and its possible replies.

    Attributes:
        messages: in OpenAI's shape: `{"role": "user", "content": "…"}`, or `ChatMessage`s.
        choices: the texts, at least one.
    """

    messages: Sequence[ChatMessage | Mapping[str, Any]]
    choices: Sequence[str]


def choice_probabilities(
    model: str, questions: Sequence[ChoiceQuestion], *, temperature: float = 1.0
) -> list[dict[str, float]]:
    """Return the probability of each choice of each question, when the reply is restricted to the choices.

    These are the probabilities that the engine samples with and the trainer trains: at each token over the tokens that
    lead to a choice, and for a choice summed over all its tokenizations. Computed in float32.

    Args:
        model: a model's name, or the folder of a model, a checkpoint, or a run, as in `train`.
        questions: any number.
        temperature: sampling temperature, above 0.

    Returns:
        For each question the probability of each choice, by its text; they add up to 1.

    Raises:
        ConfigError: a question has no choices or too many, or the temperature is not above 0.
        NotFound: `model` is the folder of a run without a checkpoint.
        ModelError: the model cannot be loaded.
    """
    import torch

    from palestra.models.device import device_of
    from palestra.models.loading import load_model
    from palestra.renderers import select_renderer
    from palestra.trainer.torch_policy import PolicyNetworks, TorchPolicy

    if not (temperature > 0.0 and math.isfinite(temperature)):
        raise ConfigError(f"temperature is {temperature}, and the probabilities of replies need one above 0")
    weights, tokenizer = load_model(weights_of_run(model), torch.float32, device_of("auto", "device"))
    policy = TorchPolicy(PolicyNetworks(model=weights, tokenizer=tokenizer), TrainerConfig(dtype="float32"))
    try:
        return _answers(policy, select_renderer(tokenizer), questions, temperature)
    finally:
        policy.close()


def _answers(
    policy: TorchPolicy, renderer: Renderer, questions: Sequence[ChoiceQuestion], temperature: float
) -> list[dict[str, float]]:
    """Return the probabilities of the choices of each question; see `choice_probabilities`."""
    rows: list[TrainSample] = []
    texts: list[list[str]] = []  # for each question the text of each of its replies
    for place, question in enumerate(questions):
        if not question.choices:
            raise ConfigError(f"question {place} has no choices")
        prompt = renderer.render([_message(message) for message in question.messages]).ids
        grammar = renderer.grammar(ReplyForm(choices=tuple(question.choices)))
        replies = policy.choices(grammar, _longest(question.choices), MOST_REPLIES)
        rows += [_row(f"question {place}", prompt, reply, grammar, temperature) for reply in replies]
        texts.append([_text(renderer, reply) for reply in replies])
    wanted: ForwardOutput = "old_logprobs"
    found = policy.forward(rows, {wanted})[wanted]
    logprobs = iter(
        [float(column[row.loss_mask].sum(dtype="float64")) for row, column in zip(rows, found, strict=True)]
    )
    answers = []
    for question, written in zip(questions, texts, strict=True):
        answer = dict.fromkeys(question.choices, 0.0)
        for text in written:
            answer[text] += math.exp(next(logprobs))
        answers.append(answer)
    return answers


def _longest(choices: Sequence[str]) -> int:
    """Return a bound on the tokens of a reply: one for each byte, and one that ends it."""
    return max(len(text.encode()) for text in choices) + 1


def _text(renderer: Renderer, reply: Sequence[int]) -> str:
    """Return the text of a reply, without its stop token."""
    return b"".join(renderer.vocabulary.bytes_of(token) for token in reply if token not in renderer.stop_ids).decode()


def _message(message: ChatMessage | Mapping[str, Any]) -> ChatMessage:
    """Return a message, made of OpenAI's shape with text as its content where it is a mapping."""
    return message if isinstance(message, ChatMessage) else text_message(message["role"], message["content"])


def _row(name: str, prompt: Ids, reply: Sequence[int], grammar: str, temperature: float) -> TrainSample:
    """Return the row of one reply, all of whose tokens count."""
    ids = np.concatenate([prompt, np.array(reply, np.int32)])
    nothing = np.zeros(len(ids), np.float32)
    return TrainSample(
        episode_id=name,
        policy="model",
        ids=ids,
        loss_mask=np.arange(len(ids)) >= len(prompt),
        logprobs=nothing,
        versions=np.zeros((len(ids), 2), np.int32),
        calls=np.zeros(len(ids), np.int32),
        advantages=nothing,
        loss_weights=nothing,
        temperatures=np.full(len(ids), temperature, np.float32),
        grammars=(GrammarSpan(len(prompt), len(reply), grammar),),
    )
