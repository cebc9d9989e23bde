"""A job's view of the models on servers: their files, without loading weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from palestra.config import DEFAULT_CONTEXT, AdapterConfig
from palestra.engine.driver import EngineJob, SampledPolicy
from palestra.errors import ConfigError, ModelError
from palestra.models.adapter_files import adapter_folder, saved_adapter
from palestra.models.catalog import exact_model, model_folder
from palestra.models.vision.processor import PictureProcessor
from palestra.renderers import PictureTokens, Renderer, select_renderer
from palestra.types.messages import Pictures
from palestra_engines.external.reply import ReplyBounds


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles:
    """A model in Hugging Face's layout, from which a server loads it.

    Attributes:
        max_positions: context length in tokens.
        shapes: of all weights, by name; a tied head has none of its own.
        sees: whether it is a vision-language model.
    """

    folder: Path
    vocab_size: int
    max_positions: int
    shapes: dict[str, tuple[int, ...]]
    sees: bool

    @property
    def parameters(self) -> int:
        """Return the number of weights."""
        return sum(map(math.prod, self.shapes.values()))


# Keys by which a server finds another model, and loads that one: any folder of its machine, or an address.
_ELSEWHERE = ("speculators_config", "speculators_model_type", "speculators_version", "name_or_path")


def read_model_files(folder: Path) -> ModelFiles:
    """Read a model's configuration, and the headers of its safetensors."""
    try:
        found: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
        if elsewhere := sorted(set(_ELSEWHERE).intersection(_keys(found))):
            raise ModelError(
                f"the model in {folder} names another model in its config.json ({', '.join(elsewhere)}), which the "
                "engine's server would load in its place; name a model with its own weights"
            )
        text = found.get("text_config", found)
        shapes: dict[str, tuple[int, ...]] = {}
        for path in sorted(folder.glob("model*.safetensors")):
            with safe_open(path, framework="pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        if not shapes:
            raise ModelError(f"{folder} has no model*.safetensors, which the engine's server loads")
        if found.get("tie_word_embeddings", text.get("tie_word_embeddings", False)):
            shapes.pop("lm_head.weight", None)
        return ModelFiles(
            folder=folder,
            vocab_size=int(text["vocab_size"]),
            max_positions=int(text.get("max_position_embeddings") or 2**20),
            shapes=shapes,
            sees="vision_config" in found,
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(f"the model in {folder} can't be read: {type(error).__name__}: {error}") from error


def _keys(found: Any) -> Iterator[str]:
    if isinstance(found, dict):
        for key, value in found.items():
            yield key
            yield from _keys(value)
    elif isinstance(found, list):
        for value in found:
            yield from _keys(value)


Images = Callable[[PictureProcessor, Pictures, bool], Any]  # see `ServerDriver.images`


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """What a server, a session and the engine need to know about a policy.

    Attributes:
        files: of the model whose whole weights the server loads.
        bounds: limits of replies.
        pictures: prepares the prompts' pictures for the server; None: the model reads text only.
        adapter: rank and scale of the server's adapters; None: it gets whole weights.
        first_adapter: folder of the initial adapter; None: the model itself.
        finishes: whether new weights are to wait until running replies are complete.
    """

    name: str
    files: ModelFiles
    tokenizer: Any
    renderer: Renderer
    bounds: ReplyBounds
    pictures: Any
    adapter: AdapterConfig | None
    first_adapter: Path | None
    finishes: bool = False


def read_served_models(job: EngineJob, images: Images) -> list[ServedModel]:
    """Read the files of all policies' models, except for their weights. `images` returns what prepares the images of
    prompts for a server.
    """
    return [_read(job, name, images) for name in job.config.policies]


def sampled_policies(job: EngineJob, models: Sequence[ServedModel]) -> dict[str, SampledPolicy]:
    """Return what sessions need to know about the policies, by name."""
    from palestra.grammars.matcher import vocabulary_of
    from palestra.grammars.pool import Grammars

    return {
        each.name: SampledPolicy(
            renderer=each.renderer,
            grammars=Grammars(vocabulary_of(each.tokenizer, each.bounds.vocab_size)),
            vocab_size=each.bounds.vocab_size,
            max_context=each.bounds.max_context,
        )
        for each in models
    }


def _read(job: EngineJob, name: str, images: Images) -> ServedModel:
    from palestra.models.causal_lm import check_architecture, load_tokenizer

    config, model, pictures = job.config, job.model_of(name), job.pictures
    policy, saved = config.policies[name], saved_adapter(model)
    is_trained = config.kind == "training" and not policy.frozen
    if saved is not None and policy.adapter is None and is_trained:
        raise ConfigError(
            f"{model} is an adapter, and engine.kind = {config.engine.kind!r} trains it as one only: set "
            f"policies.{name}.adapter"
        )
    base = model if saved is None else saved.base
    found = model_folder(base)
    files = read_model_files(found if isinstance(found, Path) else exact_model(base))
    if files.sees and (blind := [table.kind for table in config.engine.tables if not table.reads_images]):
        raise ConfigError(
            f"{model} sees pictures, and engine.kind = {blind[0]!r} is for models that read text only; take "
            "engine.kind = 'vllm' or 'embedded'"
        )
    if files.sees and (policy.adapter is not None or saved is not None):
        raise ConfigError(f"{model} sees, and adapters of models that see are not supported; leave `adapter` out")
    if policy.vision is not None and not files.sees:  # which a trainer would find after the server has loaded the model
        raise ConfigError(f"vision is {policy.vision!r}, and {model} reads text only; leave `vision` out")
    if policy.max_context > files.max_positions and policy.max_context != DEFAULT_CONTEXT:
        raise ConfigError(f"max_context is {policy.max_context} and {policy.model} has {files.max_positions} positions")
    tokenizer = load_tokenizer(model)
    if len(tokenizer) > files.vocab_size:
        raise ModelError(f"the tokenizer of {model} has {len(tokenizer)} tokens, and its weights {files.vocab_size}")
    if is_trained:
        check_architecture(files.folder)  # before a server that may well have it takes minutes to load it
    seen = shown = None
    if files.sees and pictures is not None:
        processor = PictureProcessor(files.folder)
        seen = images(processor, pictures, is_trained and policy.vision == "trained")
        shown = PictureTokens(tokenizer, processor.layout, pictures)
    renderer = select_renderer(
        tokenizer,
        keep_reasoning=config.rollout.changed_history == "keep",
        pictures=shown,
    )
    return ServedModel(
        name=name,
        files=files,
        tokenizer=tokenizer,
        renderer=renderer,
        bounds=ReplyBounds(
            vocab_size=files.vocab_size,
            stop_ids=frozenset(renderer.stop_ids),
            max_context=min(policy.max_context, files.max_positions),
        ),
        pictures=seen,
        adapter=policy.adapter if saved is None else saved.config,
        first_adapter=adapter_folder(model),
        finishes=config.rollout.weight_sync != "any_time",
    )
