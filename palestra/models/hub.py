"""Models of the Hugging Face hub, where the hub can't be reached."""

from __future__ import annotations

from pathlib import Path

from palestra.errors import ModelError

SECONDS = 10.0  # for the hub to answer; the hub's own client tries five times, for each of several files


def hub_model(name: str) -> Path | str:
    """Return what transformers is to load: `org/model` where the hub answers, else its folder in the hub's cache.

    Raises:
        ModelError: it is not in the cache, and the hub can't be reached.
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
            return name  # whatever it answered, transformers says what there is
    cached = try_to_load_from_cache(name, "config.json")
    if isinstance(cached, str):
        return Path(cached).parent
    raise ModelError(
        f"model {name!r} is not in the hub's cache, and {why}; fetch it where there is a network "
        f"(`hf download {name}`), or name a folder"
    )
