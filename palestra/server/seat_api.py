"""The routes of external players: claim a slot, observe, and act."""

from __future__ import annotations

from starlette.requests import Request

from palestra.faults import fault_point
from palestra.http.app import GuardedApp
from palestra.http.bodies import read_request
from palestra.http.protocol import until_disconnect
from palestra.server.auth import require_role, require_seat
from palestra.server.episode_routes import episode_routes
from palestra.server.state import DataPlane
from palestra.session import SeatClaim
from palestra.types.seat_wire import ActionAccepted, ActSeat, ObserveSeat, SeatAnswer
from palestra.types.wire import MAX_WAIT_SECONDS, ClaimAnswer, ClaimedEpisode, ClaimEpisode


def add_seat_routes(app: GuardedApp, plane: DataPlane) -> None:
    """Add the routes of external players; a job without them answers all with 409."""
    route = episode_routes(app, plane, "seats")

    @route("/observe_seat", ObserveSeat)
    async def observe_seat(request: Request) -> SeatAnswer:
        """Wait up to `wait_seconds` until the player has to act, another slot changes hands, or the episode is over.

        The request changes nothing and is safe to repeat.
        """
        body = await read_request(ObserveSeat, request, plane.pool)
        key = require_seat(request, body.episode_id)
        wait = min(body.wait_seconds, MAX_WAIT_SECONDS)
        plane.connections.check_capacity()
        return await until_disconnect(request.scope, plane.seats.observe(key, body.events_seen, wait))

    @route("/act_seat", ActSeat)
    async def act_seat(request: Request) -> ActionAccepted:
        """Answer an observation of the player. Repeating the same action changes nothing."""
        body = await read_request(ActSeat, request, plane.pool)
        key = require_seat(request, body.episode_id)
        fault_point("before_seat_action")
        taken = await plane.seats.act(key, body.observation_id, body.action)
        fault_point("after_seat_action")
        return ActionAccepted(episode_id=key.episode_id, observation_id=body.observation_id, taken=taken)


async def claim_seat(plane: DataPlane, body: ClaimEpisode, role: str, request: Request) -> ClaimAnswer:
    """Claim a player slot of a running episode for a worker, or wait for one.

    Raises:
        Forbidden: the key is neither the job's nor that of the slot's role.
        Conflict: the job has no slots, or the worker holds another slot of the episode.
        NotFound: the slot does not exist.
        ServerStopping: the server is shutting down.
        TooManyRequests: nearly all connections are in use.
    """
    # Who has the key of a role may not know, or may copy, what others call their workers.
    worker_id = f"{role}: {body.worker_id}" if require_role(request, role) else body.worker_id
    seats, workers, progress = plane.seats, plane.workers, plane.progress
    seats.check_role(role)
    wait = min(body.wait_seconds, MAX_WAIT_SECONDS)
    plane.connections.check_capacity()
    workers.mark_claiming(worker_id, body.request_id)
    fault_point("before_seat_claim")
    try:
        claiming = seats.claim(
            role,
            worker_id,
            body.request_id,
            body.allow_discard_timeout,
            body.episode_id,
            wait,
            lambda: progress.over,
        )
        claim = await until_disconnect(request.scope, claiming)
    finally:
        workers.mark_answered(worker_id, body.request_id)
    fault_point("after_seat_claim")
    if claim is not None:
        workers.mark_playing(worker_id, claim.table.lease_of(role), claim.key.seat_fence)
        plane.keys.recheck(request)
        return ClaimAnswer(status="claimed", episode=_claimed(plane, claim, request), job_state=progress.state.value)
    if progress.over:
        workers.mark_notified(worker_id, body.request_id)
    return ClaimAnswer(status="finished" if progress.over else "waiting", job_state=progress.state.value)


def _claimed(plane: DataPlane, claim: SeatClaim, request: Request) -> ClaimedEpisode:
    """Return everything that a worker needs to play a slot."""
    policies = plane.sessions.context.policies
    role, episode = claim.key.role, claim.table.episode
    policy = policies.roles.of_episode(episode.players).policy_of(role)
    version = str(policies.runtime(policy).version)
    return ClaimedEpisode(
        episode_id=episode.episode_id,
        kind=episode.kind,
        # Neither the task nor its name is given: both may hold what only the environment, or another seat, may know.
        task_id=episode.episode_id,
        task={},
        base_url=f"{request.base_url}v1",
        api_key=plane.keys.seat_key(claim.key),
        model=policy,
        version=version,
        policies={policy: version},
        lease_seconds=claim.lease_seconds,
        role=role,
        history=claim.table.history(role),
    )
