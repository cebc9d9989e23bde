"""Bodies of the control plane, one class each way; the scheduler's API checks them and the client builds them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from palestra.config import JobKind
from palestra.schemas.wire import Body, JsonObject, Name

Seconds = Annotated[float, Field(gt=0, lt=1e10, allow_inf_nan=False)]
Limit = Annotated[int, Field(ge=1, lt=2**53)]
Amount = Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]


class ResourcesBody(Body):
    """What a job holds while it runs."""

    cpus: float = Field(1.0, ge=0, allow_inf_nan=False, description="Cores.")
    gpus: float = Field(0.0, ge=0, allow_inf_nan=False, description="A part of one below 1, whole ones above.")
    memory_gib: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Its processes are ended together when they use more. 0: not counted, and a share of the "
        "node is what they may use (docs/operations.md).",
    )


class SubmitJob(Body):
    """`POST /jobs`. Safe to send again with the same header `Idempotency-Key`."""

    name: Name | None = Field(
        None, description="For people; need not be the only one. None: that of `from_job`, or `job`."
    )
    kind: JobKind | None = Field(None, description="None: what `config.kind` says.")
    priority: Literal["low", "normal", "high"] = "normal"
    config: JsonObject | None = Field(
        None,
        description="A JobConfig (docs/configuration.md). None: that of `from_job`, to be served unless `kind` is "
        "`training`.",
    )
    from_job: Name | None = Field(
        None, description="Start from the weights of this job of the same tenant, in the place of a model."
    )
    from_step: int | None = Field(None, ge=0, le=2**31, description="Of its checkpoint. None: the newest.")
    resources: ResourcesBody = ResourcesBody()
    private: bool | None = Field(
        None,
        description="Only its owner and the tenant's admins see it. None: as `from_job`, where that is private, else "
        "what the tenant's admins have decided (`PATCH /tenant`).",
    )
    attached: bool = Field(False, description="Cancelled when its client is not heard of for a while.")
    restarts: int = Field(3, ge=0, le=100, description="How often it is started again after its server was lost.")
    time_limit_seconds: Seconds | None = Field(
        None,
        description="How long it may run, over all of its starts; then it saves and is cancelled. A job that ends in "
        "time may start before larger ones that wait for room. None: any time.",
    )


class JobView(Body):
    """A job as its tenant sees it."""

    job_id: str
    name: str
    user: str
    kind: str
    priority: str
    state: str
    reason: str = Field(description="Why it is in this state; of a job that waits, what for.")
    resources: ResourcesBody
    attached: bool
    private: bool = Field(False, description="Only its owner and the tenant's admins see it.")
    created_at: float = Field(description="Unix seconds.")
    changed_at: float = Field(description="Unix seconds, of the newest change of state.")
    starts: int
    restarts_left: int
    time_limit_seconds: float | None = Field(
        None, description="How long it may run, over all of its starts; None: any time."
    )
    node: str | None
    cancel_requested: bool
    config: JsonObject
    from_job: str | None = Field(None, description="Whose weights it starts from; None: those of its config's model.")
    from_step: int | None = Field(None, description="Of that job's checkpoint.")
    url: str | None = Field(None, description="Of its data plane while it runs; the key is in `GET /jobs/ID/server`.")
    log_tail: str | None = Field(description="The last lines of its log, kept when it ends.")


class JobList(Body):
    """`GET /jobs`: newest first."""

    jobs: list[JobView]
    cursor: str | None = Field(description="Give it back for what follows; None: this is the end.")


class ChangeView(Body):
    """One change of a job's state."""

    number: int
    at: float
    previous: str | None
    following: str
    reason: str


class ServerView(Body):
    """Where a job's data plane is, and the key that opens it. URLs are opaque, and change when it is restarted."""

    url: str
    api_key: str


class JobKeyView(Body):
    """The new key of a job's data plane."""

    api_key: str


class ArtifactView(Body):
    """A file of a job's run."""

    path: str
    bytes: int
    modified_at: float


class NodeView(Body):
    """A machine, and what is not in use of it."""

    node_id: str
    alive: bool
    draining: bool
    cpus: float
    gpus: int
    memory_gib: float
    free_cpus: float
    free_gpus: float
    jobs: int


class QuotaBody(Body):
    """What a tenant may hold at the same time. None: as much as there is."""

    jobs: int | None = Field(None, ge=0, lt=2**31, description="That run; 0 is a pause. More wait.")
    cpus: Amount | None = None
    gpus: Amount | None = None
    memory_gib: Amount | None = None


class InUse(Body):
    """What the jobs of a tenant hold now."""

    jobs: int
    cpus: float
    gpus: float
    memory_gib: float


class ClusterView(Body):
    """`GET /cluster`."""

    nodes: list[NodeView]
    draining: bool
    queued: int = Field(description="Jobs of all tenants that wait.")
    live: int = Field(description="Jobs of all tenants that hold something.")
    quota: QuotaBody = Field(description="One's own tenant's.")
    in_use: InUse = Field(description="By one's own tenant.")


class Drain(Body):
    """`POST /cluster/drain`."""

    on: bool = True


class AddUser(Body):
    """`POST /users`."""

    name: Name
    role: Literal["admin", "member", "viewer"] = "member"


class ChangeRole(Body):
    """`PATCH /users/{name}`."""

    role: Literal["admin", "member", "viewer"]


class UserView(Body):
    """A user of the tenant."""

    name: str
    role: str
    created_at: float
    removed_at: float | None


class AddTenant(Body):
    """`POST /tenants`."""

    name: Name


class ChangeTenant(Body):
    """`PATCH /tenants/{name}`."""

    quota: QuotaBody = Field(description="What is left out stays as it is; null takes a limit away.")


class SetPrivate(Body):
    """`PATCH /tenant`: one's own."""

    private_jobs: bool = Field(description="Jobs submitted from now on are private unless they say otherwise.")


class TenantView(Body):
    """A tenant, and what it may hold."""

    name: str
    quota: QuotaBody


class LimitsBody(Body):
    """What one key may use. None: as much as the key with which it is made."""

    requests_per_minute: Annotated[float, Field(ge=1, lt=2**53, allow_inf_nan=False)] | None = None
    burst: Limit | None = Field(None, description="Requests that may come at the same moment.")
    open_jobs: Limit | None = Field(None, description="Jobs of its user that are not over.")
    body_bytes: Limit | None = Field(None, description="Of one request.")
    episodes_in_flight: Limit | None = Field(
        None, description="Claimed at the same time, of each job that is submitted with it (`rollout.max_claimed`)."
    )


class LimitsView(Body):
    """What one key may use."""

    requests_per_minute: float
    burst: int
    open_jobs: int
    body_bytes: int
    episodes_in_flight: int


class MakeKey(Body):
    """`POST /keys`."""

    user: str | None = Field(None, description="None: one's own.")
    label: str = Field("", max_length=200)
    scopes: list[str] | None = Field(None, description="None: all that the user's role and this key have.")
    lifetime_seconds: Seconds | None = Field(None, description="None: it does not expire.")
    limits: LimitsBody | None = Field(None, description="Set by admins only. None: those of the key that makes it.")


class RotateKey(Body):
    """`POST /keys/{key_id}/rotate`."""

    grace_seconds: float = Field(86400.0, ge=0, allow_inf_nan=False, description="How long the old key still opens.")


class KeyView(Body):
    """A key; with this nobody gets in."""

    key_id: str
    user: str
    label: str
    scopes: list[str]
    limits: LimitsView
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None
    replaced_by: str | None


class NewKeyView(KeyView):
    """A key that was just made: its secret is shown this once."""

    secret: str


class IdentityView(Body):
    """`GET /me`."""

    tenant: str
    user: str
    role: str
    scopes: list[str]
    private_jobs: bool = Field(False, description="Jobs of the tenant are private unless they say otherwise.")


class AuditView(Body):
    """A line of the audit log."""

    number: int
    at: float
    who: str
    key_id: str | None
    what: str
    target: str
    outcome: str
