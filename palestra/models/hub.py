"""Find models of the Hugging Face hub, also where the hub can't be reached."""

from __future__ import annotations

from pathlib import Path

from palestra.errors import ModelError

# How long the hub may take to answer. Its own client would try five times for each of several files, so one request
# finds out first whether the hub answers at all.
SECONDS = 10.0


def hub_model(name: str) -> Path | str:
    """Return what transformers is to load: `org/model` if the hub answers, else its folder in the hub's cache.

    Raises:
        ModelError: the model is not in the cache, and the hub can't be reached.
    """
    import httpx2
    from huggingface_hub import constants, get_session, try_to_load_from_cache

    why = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(f"{constants.ENDPOINT}/{name}/resolve/main/config.json", timeout=SECONDS)
        except httpx2.HTTPError as error:
            why = f"{constants.ENDPOINT} can't be reached ({str(error) or type(error).__name__})"
        else:
            return name  # also if the model does not exist: the error of transformers says so
    cached = try_to_load_from_cache(name, "config.json")
    if isinstance(cached, str):
        return Path(cached).parent
    raise ModelError(
        f"model {name!r} is not in the hub's cache, and {why}; fetch it where there is a network "
        f"(`hf download {name}`), or name a folder"
    )
