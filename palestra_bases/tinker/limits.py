"""What one tenant may ask of a Tinker server, and how long the server keeps results and sessions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TinkerLimits:
    """The limits of a server; each tenant has those that are counted for itself.

    Attributes:
        body_bytes: longest body of a `forward_backward`.
        json_bytes: longest body of every other request.
        sessions: most sessions of a tenant that are alive.
        samplers: most samplers of a session.
        gradients: most requests whose gradients one step applies.
        datums: most datums of one request.
        targets: most targets of one request whose positions have several each.
        models: most models of a tenant whose session is not over.
        loaded_models: most models of all tenants that are in memory; others come back from the disk when they are used.
        waiting: most requests of a tenant that have no result yet.
        waiting_bytes: most bytes of their bodies.
        waiting_samples: most sequences of a tenant that are to be sampled, in all its requests without a result.
        checkpoints: most checkpoints of a tenant that have not expired.
        samples: most sequences of one request.
        sample_bytes: longest result of one request for samples; SQLite takes no value of a gigabyte.
        futures: most results of a tenant that are kept; the oldest are forgotten first.
        future_seconds: how long a result is kept.
        forgotten: most requests of a tenant of which it is known that their results were forgotten.
        forgotten_seconds: how long that is known, after the result.
        kept_seconds: how long a session that is over is listed, and a model of it without checkpoints after its last
            use.
        session_seconds: how long a session counts as alive after its last heartbeat.
        poll_seconds: how long an answer waits for a result.
        checkpoint_steps: optimizer steps between two checkpoints of a model, from which it is restored.
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
