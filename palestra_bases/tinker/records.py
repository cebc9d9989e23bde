"""Rows of a Tinker server's journal, as the parts of the server pass them to one another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from palestra.config import AdapterConfig

Category = Literal["user", "server"]
SCHEME = "tinker://"
COPIED = "copied_from"  # in the data of a copied checkpoint and of its model: the path of the source
TRAINING, SAMPLER, EXTERNAL = "weights", "sampler_weights", "external_weights"
_API_KINDS = {TRAINING: "training", SAMPLER: "sampler", EXTERNAL: "external"}  # what the API calls them


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRecord:
    """A trained model.

    Attributes:
        seed: of the adapter's initial weights.
        data: requested kinds of layers, and the user's metadata.
        created_at, used_at: Unix seconds.
        executed: newest request with a result, as all before it have; -1: none.
        dropped: requests up to this number exist only in checkpoints, and cannot be repeated; -1: none.
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
        target: the model or the sampler.
        seq_id: number among the requests of the target.
        body: as received; None: no longer needed.
        state: `pending`, `done`, `failed` or `forgotten`.
        result: protobuf or JSON; JSON with the error for a failed one.
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
        expires_at: Unix seconds; None: never.
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
        """Return the API's name of this kind of checkpoint: `training`, `sampler` or `external`."""
        return _API_KINDS[self.name.partition("/")[0]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """A sampling session: a base model, or an adapter at one moment.

    Attributes:
        model_path: the checkpoint; None: the base model itself, or unnamed weights.
        folder: of the adapter; None: the base model itself.
        is_private: whether the folder belongs only to this sampler.
    """

    sampler_id: str
    tenant: str
    session_id: str
    base: str
    model_path: str | None
    folder: Path | None
    is_private: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TinkerLimits:
    """The limits of a server, per tenant where that applies.

    Attributes:
        json_bytes: of every other request body.
        gradients: requests whose gradients one step applies.
        targets: per request whose positions have several targets.
        models: per tenant, in live sessions.
        waiting: requests without a result, per tenant.
        waiting_samples: sequences to be sampled, per tenant, in all requests without a result.
        sample_bytes: of the result of one sampling request; SQLite limits values to a gigabyte.
        futures: kept results per tenant; the oldest are dropped first.
        future_seconds: how long a result is kept.
        forgotten: requests per tenant that are remembered without their results.
        forgotten_seconds: how long these are remembered.
        kept_seconds: how long an ended session is listed, and its models without checkpoints after their last use.
        session_seconds: how long a session lives after its last heartbeat.
        silent_seconds: how long after its last heartbeat a session is sampled for.
        poll_seconds: how long an answer waits for a result.
        checkpoint_steps: optimizer steps between two checkpoints of a model for restoring it.
    """

    body_bytes: int = 64 * 2**20
    json_bytes: int = 2 * 2**20
    sessions: int = 1000
    samplers: int = 10_000
    gradients: int = 4096
    datums: int = 4096
    targets: int = 2**20
    models: int = 16
    waiting: int = 4096
    waiting_bytes: int = 2**30
    waiting_samples: int = 16_384
    checkpoints: int = 1000
    samples: int = 1024
    sample_bytes: int = 2**29
    futures: int = 10_000
    future_seconds: float = 24 * 3600.0
    forgotten: int = 100_000
    forgotten_seconds: float = 8 * 24 * 3600.0
    kept_seconds: float = 90 * 24 * 3600.0
    session_seconds: float = 600.0
    silent_seconds: float = 120.0  # from then on the SDK warns that its heartbeats do not arrive
    poll_seconds: float = 30.0
    checkpoint_steps: int = 16
