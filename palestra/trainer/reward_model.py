"""The files of a reward model: transformers' model for the classification of sequences, with one class.

Its input ends with the last token of the reply. The configuration names no padding token, because a reply may end with
the one of its tokenizer, and the model would then read the value of the token before: pass one sequence at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from palestra.errors import CheckpointError, ConfigError
from palestra.models.causal_lm import CausalLM
from palestra.trainer.checkpoint import FOLDER_OF_REWARDS

_FILE = "model.safetensors"
_HEAD, _BODY = "value_head.", "body."  # beginnings of the critic's names


def check_classifier(model: CausalLM) -> None:
    """Raise ConfigError unless transformers has a model for the classification of sequences on this body."""
    if type(model.config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ConfigError(
            "algorithm 'reward_model' needs a model with which transformers can classify sequences, and it can't with "
            f"{type(model.config).__name__}"
        )


def write_reward_model(
    checkpoint: Path, model: CausalLM, tokenizer: Any, parameters: Iterable[tuple[str, Tensor]]
) -> None:
    """Write a critic of replies into a new folder of a checkpoint, from which transformers loads it.

    Args:
        model: the critic's, for its configuration.
        parameters: of the critic, by its names: matrices [n, d] and norms [d].
    """
    folder = checkpoint / FOLDER_OF_REWARDS
    folder.mkdir()
    tokenizer.save_pretrained(folder)
    config = copy.deepcopy(model.config)
    config.architectures = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)].__name__]
    config.num_labels, config.pad_token_id, config.dtype = 1, None, "float32"
    config._attn_implementation = "sdpa"
    config.save_pretrained(folder)
    body = f"{model.model.base_model_prefix}."
    tensors = {_file_name(name, body): parameter.detach().cpu().contiguous() for name, parameter in parameters}
    safetensors.torch.save_file(tensors, folder / _FILE, metadata={"format": "pt"})


def read_reward_model(checkpoint: Path, model: CausalLM, names: Iterable[str]) -> dict[str, Tensor]:
    """Return what `write_reward_model` wrote, [n, d] or [d], on the CPU, by the critic's names.

    Args:
        names: of the critic's parameters.

    Raises:
        CheckpointError: the checkpoint has no reward model.
    """
    file, body = checkpoint / FOLDER_OF_REWARDS / _FILE, f"{model.model.base_model_prefix}."
    if not file.is_file():
        raise CheckpointError(f"{checkpoint} has no reward model")
    found = safetensors.torch.load_file(file)
    own = {name: _file_name(name, body) for name in names}
    return {name: found[there] for name, there in own.items() if there in found}


def _file_name(name: str, body: str) -> str:
    """Return the name of a critic's parameter in the file; `body` begins those of the model's body."""
    return f"score.{name.removeprefix(_HEAD)}" if name.startswith(_HEAD) else body + name.removeprefix(_BODY)
