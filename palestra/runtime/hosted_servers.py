"""vLLM in the process of an engine worker, which a cluster has given a bundle on some machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from palestra.config import JobConfig
from palestra.engine.vllm.config import VllmEngineConfig
from palestra.errors import EngineFailure, ServerFailed
from palestra.pictures.stored import StoredPictures
from palestra.runtime.engine_servers import EngineServers
from palestra.runtime.served_models import ServedModel, read_served_models
from palestra.runtime.server_places import ServerPlaces

if TYPE_CHECKING:
    from palestra.engine.external.engine import ExternalEngine


def start_servers(
    config: JobConfig, weights: Mapping[str, str], pictures: StoredPictures | None, place: int
) -> tuple[ExternalEngine, list[ServedModel]]:
    """Start a vLLM server for each policy beside this process, and return when they are ready. Blocks for minutes.

    The servers listen on Unix sockets, so that no other machine reaches them, and end with this process. New weights
    come in a file of a folder that all machines of the job see, where vLLM itself reads it.

    Args:
        config: the job, whose engine has one worker: this one.
        weights: folders to load models from, instead of the policies' `model`, by the policy's name.
        pictures: where those of prompts are found; None: there are none.
        place: of the worker among those of the job, for the names of logs.

    Raises:
        PalestraError: they can't be started; see `ServerPlaces` and `EngineServers`.
    """
    settings = config.engine
    assert isinstance(settings, VllmEngineConfig)
    assert settings.python is not None
    models = read_served_models(config, weights, pictures)
    # All of the bundle is this worker's: the trainer has another one, or the job's own.
    places = ServerPlaces(config, settings, settings.python, models, trainer_is_here=False)
    places.check_memory([0])
    try:
        return EngineServers(config, settings, models, place, places.of_worker(0), None).engine(), models
    except EngineFailure as error:
        raise ServerFailed(str(error)) from error  # what takes too long would take as long five times
