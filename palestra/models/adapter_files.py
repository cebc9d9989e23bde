"""Adapters on disk, in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor

from palestra.config import SMOLLM2, TINY, AdapterConfig
from palestra.errors import ModelError
from palestra.models.adapters import Adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # PEFT puts the model of transformers into two others
_MATRIX = re.compile(rf"{re.escape(_PREFIX)}(.+\.(?:lora_[AB]\.weight|lora_embedding_[AB]))")
_OWN = re.compile(rf"{re.escape(_PREFIX)}(.+)\.base_layer\.weight")  # a base's own, see `_read_weights`
# What changes the product of a layer, or which weights are trained, with the value that changes nothing.
_PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "use_dora": False,
    "lora_bias": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "target_parameters": None,
    "trainable_token_indices": None,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedAdapter:
    """An adapter on disk.

    Attributes:
        base: a model's name, as in `PolicyConfig.model`, or a folder.
        config: `targets` are full layer names, including embedding and head.
        weights: by the names of `Adapter.named_parameters`.
    """

    base: str
    config: AdapterConfig
    weights: dict[str, Tensor]

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the names of the layers, in order."""
        return tuple(self.config.targets)


def adapter_folder(name: str) -> Path | None:
    """Return the folder of an adapter; None: the name is a whole model's."""
    if name in (SMOLLM2, TINY):
        return None
    folder = Path(name)
    return folder if (folder / CONFIG).is_file() else None


def base_of(name: str) -> str:
    """Return a model's name without its adapter: the adapter's base, or the name itself."""
    folder = adapter_folder(name)
    return name if folder is None else str(_read_config(folder)["base_model_name_or_path"])


def tokenizer_source(name: str) -> str:
    """Return where a model's tokenizer is: an adapter's folder, or its base, because PEFT saves no tokenizer."""
    folder = adapter_folder(name)
    return name if folder is not None and (folder / "tokenizer_config.json").is_file() else base_of(name)


def saved_adapter(name: str) -> SavedAdapter | None:
    """Return the adapter in a folder; None: the name is a whole model's."""
    folder = adapter_folder(name)
    return None if folder is None else read_adapter(folder)


def read_adapter(folder: Path) -> SavedAdapter:
    """Read an adapter written by Palestra or PEFT."""
    data, weights = _read_config(folder), _read_weights(folder)
    base, rank = str(data["base_model_name_or_path"]), data["r"]
    for key, plain in _PLAIN.items():
        if data.get(key, plain) not in (plain, None):
            raise ModelError(f"the adapter in {folder} has {key} = {data[key]!r}, which is not supported")
    if not base or adapter_folder(base) is not None:
        raise ModelError(
            f"the adapter in {folder} is for the model {base!r}, which is no model with weights of its own"
        )
    layers = sorted({name.rpartition(".lora_")[0] for name in weights})
    for name, matrix in weights.items():
        down = name.endswith((".lora_A.weight", ".lora_embedding_A"))
        if matrix.ndim != 2 or matrix.shape[0 if down else 1] != rank:
            raise ModelError(f"{name} in {folder} has the shape {tuple(matrix.shape)}, and the rank is {rank}")
    try:
        alpha = data.get("lora_alpha")
        if data.get("use_rslora") and isinstance(alpha, int | float):
            alpha *= math.sqrt(rank)  # the same factor, as alpha / rank
        config = AdapterConfig.model_validate({"rank": rank, "targets": layers, "alpha": alpha})
    except ValidationError as error:
        raise ModelError(f"the adapter in {folder} is not supported: {error.errors()[0]['msg']}") from error
    return SavedAdapter(base=base, config=config, weights=weights)


def _read_config(folder: Path) -> dict[str, Any]:
    """Return an adapter's configuration, which has at least base and rank."""
    try:
        data: dict[str, Any] = json.loads((folder / CONFIG).read_bytes())
        return data | {"r": int(data["r"]), "base_model_name_or_path": data["base_model_name_or_path"] or ""}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ModelError(f"{folder / CONFIG} can't be read: {type(error).__name__}: {error}") from error


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the matrices of an adapter by name, [r, in] and [out, r], without unchanged base weights of PEFT."""
    found, own = dict[str, Tensor](), set[str]()
    try:
        with safetensors.safe_open(folder / WEIGHTS, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                if (match := _OWN.fullmatch(name)) is not None:
                    own.add(match[1])
                elif (match := _MATRIX.fullmatch(name)) is not None:
                    found[match[1]] = file.get_tensor(name)
                else:
                    raise ModelError(
                        f"the adapter in {folder} has {name}, and only those of linear layers and the embedding are "
                        "supported"
                    )
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{folder / WEIGHTS} can't be read: {type(error).__name__}: {error}") from error
    if alone := sorted(own - {name.partition(".lora_")[0] for name in found}):
        raise ModelError(f"the adapter in {folder} has weights of {alone[0]} itself, and only matrices are supported")
    return found


def write_adapter(folder: Path, adapter: Adapter, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write an adapter, in its own precision, into an existing folder, for `read_adapter` and for PEFT. `weights` [r,
    in] and [out, r], by name, replace its own if this process has only parts of them.
    """
    named = dict(adapter.named_parameters()) if weights is None else weights
    write_matrices(folder, adapter.config, adapter.base, adapter.targets, named)


def write_matrices(
    folder: Path, config: AdapterConfig, base: str, targets: Sequence[str], weights: Mapping[str, Tensor]
) -> None:
    """Write the matrices of an adapter into an existing folder, for `read_adapter` and for PEFT. Matrices are [r, in]
    and [out, r], named as by `Adapter.named_parameters`; `targets` are name suffixes that match exactly their layers.
    """
    tensors = {f"{_PREFIX}{name}": p.detach().contiguous() for name, p in weights.items()}
    safetensors.torch.save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    written = {
        **_PLAIN,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "target_modules": list(targets),
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(written, indent=2), encoding="utf-8")
