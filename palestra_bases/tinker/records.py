"""Rows of a Tinker server's journal, as the parts of the server pass them to one another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from palestra.config import AdapterConfig

Kind = Literal[
    "create_model",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_for_sampler",
    "save_external",
    "load_weights",
]
Category = Literal["user", "server"]
SCHEME = "tinker://"
COPIED = "copied_from"  # in the data of a copied checkpoint and of its model: the path of the source
TRAINING, SAMPLER, EXTERNAL = "weights", "sampler_weights", "external_weights"
_API_KINDS = {TRAINING: "training", SAMPLER: "sampler", EXTERNAL: "external"}  # what the API calls them


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRecord:
    """A model that is trained.

    Attributes:
        model_id: `SESSION:train:NUMBER`, as clients make it up.
        tenant: whose it is.
        session_id: in which it was made.
        base: name of the base model.
        adapter: rank, scale and layers.
        seed: of the adapter's first weights.
        data: which kinds of layers were asked for, and the user's own metadata.
        created_at, used_at: Unix seconds.
        executed: number of the newest request that has a result, as all before it have; -1: none has.
        dropped: requests up to this number are in checkpoints alone, and can't be done again; -1: all can.
    """

    model_id: str
    tenant: str
    session_id: str
    base: str
    adapter: AdapterConfig
    seed: int
    data: Mapping[str, Any]
    created_at: float
    used_at: float
    executed: int = -1
    dropped: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class FutureRequest:
    """A request whose result is a future.

    Attributes:
        request_id: by which the result is asked for.
        tenant: whose it is.
        kind: what is to be done.
        target: the model or the sampler.
        seq_id: number among the requests of the target.
        body: as it came; None: it is no longer needed.
        state: `pending`, `done`, `failed` or `forgotten`.
        result: protobuf or JSON; of a failed one JSON with the error.
    """

    request_id: str
    tenant: str
    kind: str
    target: str
    seq_id: int
    body: bytes | None
    state: str
    result: bytes | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Weights that were saved under a name.

    Attributes:
        path: `tinker://MODEL/KIND/NAME`, where KIND is `weights`, `sampler_weights` or `external_weights`.
        tenant: whose it is; "": everybody's.
        model_id: of which model.
        name: the path's last two parts, which a client calls the checkpoint's id.
        folder: where it is.
        base, adapter, data: of the model; see `ModelRecord`.
        step: optimizer steps before it.
        bytes: of its files.
        created_at: Unix seconds.
        expires_at: Unix seconds; None: never.
        user_metadata: of the user.
        public: whether all tenants may use it.
    """

    path: str
    tenant: str
    model_id: str
    name: str
    folder: Path
    base: str
    adapter: AdapterConfig
    data: Mapping[str, Any]
    step: int
    bytes: int
    created_at: float
    expires_at: float | None
    user_metadata: Mapping[str, str] | None
    public: bool = False

    @property
    def kind(self) -> str:
        """Return what the API calls this kind of checkpoint: `training`, `sampler` or `external`."""
        return _API_KINDS[self.name.partition("/")[0]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """A sampling session: a base model, or an adapter as it was at one moment.

    Attributes:
        sampler_id: as clients send it.
        tenant: whose it is.
        session_id: in which it was made.
        base: name of the base model.
        model_path: the checkpoint; None: the base model itself, or weights that have no name.
        folder: of the adapter; None: the base model itself.
        is_private: whether the folder belongs to this sampler alone.
    """

    sampler_id: str
    tenant: str
    session_id: str
    base: str
    model_path: str | None
    folder: Path | None
    is_private: bool = False
