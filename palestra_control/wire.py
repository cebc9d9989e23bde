"""Bodies of the control plane, one class for each request and answer.

The API checks them and the client builds them.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from palestra.config import JobKind
from palestra.errors import Forbidden
from palestra.types.gpus import GpuUse
from palestra.types.states import JobState
from palestra.types.wire import Body, JsonObject, Name
from palestra_control.jobs import Placement, Role

# Upper bounds keep numbers within what SQLite, PostgreSQL and JavaScript clients can hold exactly.
Seconds = Annotated[float, Field(gt=0, lt=1e10, allow_inf_nan=False)]
Limit = Annotated[int, Field(ge=1, lt=2**53)]
Amount = Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]


class ProcessBody(Body):
    """The resources of one process."""

    cpus: float = Field(
        1.0, ge=0, allow_inf_nan=False, description="Cores. A request that leaves them out on a shared base: 0.25."
    )
    gpus: float = Field(0.0, ge=0, allow_inf_nan=False, description="A part of one below 1, whole ones above.")
    memory_gib: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Its processes are ended together when they use more. 0: not counted, and a share of the "
        "node is what they may use (docs/how-to/service-rules.md).",
    )
    gpu_kind: Name | None = Field(
        None, description="The kind of GPU that its node has to have, as `GET /cluster` shows it. None: any."
    )
    labels: dict[Name, Name] = Field({}, max_length=8, description="Labels that its node has to have, by name.")


class BundleBody(ProcessBody):
    """The resources of each process of one role, apart from the job's own process."""

    role: Role = Field(
        description="`engine`: inference workers that the job starts (`engine.replicas`); `trainer`: ranks "
        "(`trainer.devices`); `runner`: runners (`environment.runners`)."
    )
    count: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="How many processes: as many as the configuration has of this role; another number is refused. "
        "None: taken from there.",
    )

    @model_validator(mode="wrap")
    @classmethod
    def _name_role_and_value(cls, given: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        """Name the role and the value in the first error of a bundle.

        A list of bundles only has their indices, which users do not write.
        """
        try:
            return read(given)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            if not isinstance(given, dict) or not isinstance(first["input"], str | int | float):
                raise
            role = given.get("role")
            whose = f"the {role} bundle has" if role in get_args(Role) else "it is"
            text = f"{whose} {str(first['input'])[:40]!r}: {first['msg']}"
            details = InitErrorDetails(
                type=PydanticCustomError("bundle", "{text}", {"text": text}), loc=first["loc"], input=given
            )
            raise ValidationError.from_exception_data(error.title, [details]) from None


class ResourcesBody(ProcessBody):
    """The resources of a job: of its own process, and its bundles (docs/how-to/nodes.md)."""

    bundles: list[BundleBody] = Field(
        [],
        max_length=3,
        description="Of processes that may be on other nodes than the job's own. A role without one: its processes are "
        "on the job's node, and their cores are added to `cpus`.",
    )
    placement: Placement = Field(
        "PACK",
        description="How own process and bundles are placed. `PACK`: on few nodes; `STRICT_PACK`: on one node; "
        "`SPREAD`: on many nodes.",
    )


class SubmitJob(Body):
    """Request of `POST /jobs`: queue a job. Safe to send again with the same header `Idempotency-Key`."""

    name: Name | None = Field(
        None,
        description="For people; need not be unique. None: that in `config_toml`, or of `from_job`, or `job`.",
    )
    kind: JobKind | None = Field(None, description="None: what `config.kind` says.")
    priority: Literal["low", "normal", "high"] = "normal"
    config: JsonObject | None = Field(
        None,
        description="A JobConfig (docs/reference/configuration.md). None: that of `from_job`, to be served unless "
        "`kind` is `training`.",
    )
    config_toml: str | None = Field(
        None, max_length=2**18, description="The same as TOML, as a job's file has it, in place of `config`."
    )
    from_job: Name | None = Field(
        None, description="Start from the weights of this job of the same tenant and not from a model's."
    )
    from_step: int | None = Field(None, ge=0, le=2**31, description="Step of its checkpoint. None: the newest.")
    resources: ResourcesBody = ResourcesBody()
    attached: bool = Field(False, description="Cancel the job when its client has been silent for a while.")
    restarts: int = Field(3, ge=0, le=100, description="How often it is started again after its server was lost.")
    time_limit_seconds: Seconds | None = Field(
        None,
        description="How long it may run, over all of its starts; then it saves and is cancelled. A job that ends in "
        "time may start before larger ones that wait for room. None: any time.",
    )


class JobView(Body):
    """A job as its tenant's users see it, in the answers of `/jobs`."""

    job_id: str
    name: str
    user: str
    kind: str
    priority: str
    state: str
    reason: str = Field(description="Why it is in this state; of a job that waits, what for.")
    place: int | None = Field(
        None,
        description="Whose turn it is, among the waiting jobs of all tenants; 1 is the next. None: it does not wait.",
    )
    resources: ResourcesBody
    attached: bool
    created_at: float = Field(description="Unix seconds.")
    changed_at: float = Field(description="Unix seconds, of the newest change of state.")
    starts: int
    restarts_left: int
    time_limit_seconds: float | None = Field(
        None, description="How long it may run, over all of its starts; None: any time."
    )
    node: str | None
    bundle_nodes: list[str] = Field([], description="Where the processes of its bundles run or ran last, in order.")
    cancel_requested: bool
    config: JsonObject
    from_job: str | None = Field(None, description="The job whose weights it starts from; None: the config's model.")
    from_step: int | None = Field(None, description="Step of that job's checkpoint.")
    url: str | None = Field(
        None, description="URL of its data plane while it runs; the key is in `GET /jobs/ID/server`."
    )
    log_tail: str | None = Field(description="The last lines of its log, kept when it ends.")
    estimate: str | None = Field(
        None, description="In the answer to a submission: what a training job will take, by former runs."
    )


class JobList(Body):
    """Answer of `GET /jobs`: one page of the tenant's jobs, newest first."""

    jobs: list[JobView]
    cursor: str | None = Field(description="Pass it to get the next page; None: this is the last one.")


class JobChange(Body):
    """A change of a job's state."""

    job_id: str
    number: int = Field(description="1, 2, … in each tenant, so that numbers tell nothing about other tenants.")
    at: float = Field(description="Unix seconds.")
    previous: JobState | None = Field(description="None: the job was submitted.")
    following: JobState
    reason: str


class ServerView(Body):
    """The address of a job's data plane, and its key. URLs are opaque, and change when the job is started again."""

    url: str
    api_key: str


class JobKeyView(Body):
    """Answer of the route that replaces the key of a job's data plane: the new key, shown once."""

    api_key: str


class ArtifactView(Body):
    """A file in the folder of a job's run, by its path relative to this folder."""

    path: str
    bytes: int
    modified_at: float

    def place_in(self, folder: Path) -> Path:
        """Return the file's path in a copy of the run. Raises Forbidden: the path leads out of the folder."""
        if PurePosixPath(self.path).is_absolute() or ".." in PurePosixPath(self.path).parts:
            raise Forbidden(
                f"the control plane names the file {self.path!r}, which lies outside the run; nothing was copied"
            )
        return folder / self.path


class NodeView(Body):
    """A node of the cluster: its resources, and how much is free."""

    node_id: str
    alive: bool
    draining: bool
    cpus: float
    gpus: int
    memory_gib: float
    free_cpus: float
    free_gpus: float
    free_memory_gib: float
    jobs: int
    gpu_use: list[GpuUse] = Field([], description="What its graphics cards do, where their driver says it.")
    gpu_problem: str = Field("", description="Why there are no figures of them; empty: there are, or it has no card.")
    gpu_kind: str | None = Field(None, description="Of its graphics cards; None: it has none, or it is not known.")
    labels: dict[str, str] = Field({}, description="That the operator has given it, for `labels` of a job.")


class QuotaBody(Body):
    """The resources that a tenant's jobs may use at the same time, and their budget in all. None: unlimited."""

    jobs: int | None = Field(None, ge=0, lt=2**31, description="Jobs that may run; more wait. 0 pauses the tenant.")
    cpus: Amount | None = None
    gpus: Amount | None = None
    memory_gib: Amount | None = None
    adapters: int | None = Field(
        None, ge=0, lt=2**31, description="On base servers of the service, of jobs that are not over; more are refused."
    )
    weight: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = Field(
        None, description="Share of a base server's tokens beside other tenants' weights. None: 1."
    )
    money: Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)] | None = Field(
        None, description="Budget: what all jobs together may spend, by their `[prices]`."
    )
    hours: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] | None = Field(
        None, description="Budget: hours for which all jobs together may run."
    )
    tokens: int | None = Field(None, ge=0, lt=2**62, description="Budget: tokens of all prompts and replies of jobs.")


class SpentBody(Body):
    """What the jobs of a tenant have spent of its budget, or were given to spend."""

    money: float
    hours: float
    tokens: int


class InUse(Body):
    """The resources that a tenant's jobs use now."""

    jobs: int
    cpus: float
    gpus: float
    memory_gib: float


class BaseView(Body):
    """A base server of the service, on which several jobs share one model in memory."""

    base_id: str
    model: str
    deterministic: bool
    state: str
    reason: str
    node: str
    cpus: float
    gpus: float
    memory_gib: float
    starts: int
    idle_seconds: float | None = Field(description="How long it has had no job; None: it has some, or does not serve.")
    jobs: int = Field(description="Jobs of all tenants that run on it.")
    own_jobs: int = Field(description="Those of the caller's tenant.")
    adapters: int = Field(description="Of all its jobs.")
    waiting: int = Field(description="Requests in the queue of its trainer.")
    longest_wait_seconds: float = Field(description="Since the oldest of these came.")
    tokens: int = Field(description="Computed by its trainer for the jobs that are there.")


class ClusterView(Body):
    """Answer of `GET /cluster`: the nodes, the length of the queue, and the quota of the caller's tenant."""

    nodes: list[NodeView]
    draining: bool
    queued: int = Field(description="Jobs of all tenants that wait.")
    live: int = Field(description="Jobs of all tenants that hold something.")
    quota: QuotaBody = Field(description="The quota of the caller's tenant.")
    in_use: InUse = Field(description="What the jobs of the caller's tenant hold.")
    spent: SpentBody | None = Field(
        None, description="What these have used of its budget, or were given. None: there is none."
    )
    bases: list[BaseView] = Field(
        [], description="Base servers: all for the operator, else those with jobs of the caller's tenant."
    )


class Drain(Body):
    """Request of `POST /cluster/drain`: stop or resume starting jobs."""

    on: bool = True


class AddUser(Body):
    """Request of `POST /users`: add a user to the caller's tenant."""

    name: Name
    role: Literal["admin", "member"] = "member"


class ChangeRole(Body):
    """Request of `PATCH /users/{name}`: give a user another role."""

    role: Literal["admin", "member"]


class UserView(Body):
    """A user of the tenant. A removed user stays in the list, with the time of the removal."""

    name: str
    role: str
    created_at: float
    removed_at: float | None


class AddTenant(Body):
    """Request of `POST /tenants`: add a tenant with one admin, whose key is in the answer."""

    name: Name


class ChangeTenant(Body):
    """Request of `PATCH /tenants/{name}`: change a tenant's quota."""

    quota: QuotaBody = Field(description="What is left out stays as it is; null takes a limit away.")


class TenantView(Body):
    """A tenant, its quota, and what its jobs have spent of its budget."""

    name: str
    quota: QuotaBody
    spent: SpentBody | None = Field(None, description="What jobs have used or were given. None: there is no budget.")


class LimitsBody(Body):
    """The limits of a new key. None: those of the key that creates it."""

    requests_per_minute: Annotated[float, Field(ge=1, lt=2**53, allow_inf_nan=False)] | None = None
    burst: Limit | None = Field(None, description="Requests that may come at the same moment.")
    open_jobs: Limit | None = Field(None, description="Jobs of its user that are not over.")
    body_bytes: Limit | None = Field(None, description="Largest body of one request.")
    episodes_in_flight: Limit | None = Field(
        None, description="Claimed at the same time, of each job that is submitted with it (`rollout.max_claimed`)."
    )


class LimitsView(Body):
    """The limits of a key, as they are applied to its requests."""

    requests_per_minute: float
    burst: int
    open_jobs: int
    body_bytes: int
    episodes_in_flight: int


class MakeKey(Body):
    """Request of `POST /keys`: make a key."""

    user: str | None = Field(None, description="User of the new key. None: the caller.")
    label: str = Field("", max_length=200)
    lifetime_seconds: Seconds | None = Field(None, description="None: it does not expire.")
    limits: LimitsBody | None = Field(None, description="Set by admins only. None: those of the key that makes it.")


class KeyView(Body):
    """A key without its secret."""

    key_id: str
    user: str
    label: str
    limits: LimitsView
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None


class NewKeyView(KeyView):
    """A new key with its secret, shown once."""

    secret: str


class IdentityView(Body):
    """Answer of `GET /me`: tenant, user and role of the calling key."""

    tenant: str
    user: str
    role: str
    operator: bool = Field(False, description="It may change tenants, their quotas, and drain the cluster.")


class AuditEntry(Body):
    """One line of a tenant's audit log: who changed what, and with which key."""

    number: int = Field(0, description="1, 2, … in the tenant.")
    at: float = Field(description="Unix seconds.")
    who: str = Field(description="A user's name, or a part of Palestra.")
    key_id: str | None = Field(description="None: not done with a key.")
    what: str
    target: str
