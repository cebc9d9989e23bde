"""Limits of one tenant of a Tinker server, and how long results and sessions are kept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TinkerLimits:
    """The limits of a server, per tenant where that applies.

    Attributes:
        body_bytes: of a `forward_backward`.
        json_bytes: of every other request body.
        sessions: live ones per tenant.
        samplers: per session.
        gradients: requests whose gradients one step applies.
        datums: per request.
        targets: per request whose positions have several targets.
        models: per tenant, in live sessions.
        loaded_models: in memory, of all tenants; others are restored from disk when used.
        waiting: requests without a result, per tenant.
        waiting_bytes: of their bodies.
        waiting_samples: sequences to be sampled, per tenant, in all requests without a result.
        checkpoints: unexpired ones per tenant.
        samples: sequences per request.
        sample_bytes: of the result of one sampling request; SQLite limits values to a gigabyte.
        futures: kept results per tenant; the oldest are dropped first.
        future_seconds: how long a result is kept.
        forgotten: requests per tenant that are remembered without their results.
        forgotten_seconds: how long these are remembered.
        kept_seconds: how long an ended session is listed, and its models without checkpoints after their last use.
        session_seconds: how long a session lives after its last heartbeat.
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
    loaded_models: int = 8
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
    poll_seconds: float = 30.0
    checkpoint_steps: int = 16
