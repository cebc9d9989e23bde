"""The routes that workers call: claim, heartbeat, end and abort episodes, and push tasks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from starlette.requests import Request

from palestra.config import AlgorithmConfig, JobConfig
from palestra.errors import ConfigError, Forbidden, InvalidRequest, ServerStopping
from palestra.http.app import GuardedApp
from palestra.http.bodies import parse_body, read_request, read_with
from palestra.http.protocol import until_disconnect
from palestra.pictures.containers import MAX_PICTURE_BYTES
from palestra.server.auth import caller_of, require_episode, require_job
from palestra.server.episode_routes import Route, episode_routes
from palestra.server.seat_api import claim_seat
from palestra.server.state import DataPlane
from palestra.session import EpisodeKey, SeatKey
from palestra.types.calls import AgentStepReward, StepTimes
from palestra.types.conversations import read_conversations
from palestra.types.records import FORFEIT, MAX_STEPS, SOLE_AGENT, EpisodeEnd, EpisodeRecord, Task
from palestra.types.wire import (
    MAX_REWARD,
    MAX_WAIT_SECONDS,
    AbortEpisode,
    ClaimAnswer,
    ClaimedEpisode,
    ClaimEpisode,
    EndEpisode,
    EpisodeAnswer,
    EpisodeCalls,
    EpisodeRegistered,
    HeartbeatEpisode,
    PushTasks,
    RegisterEpisode,
    RolloutFacts,
    TasksPushed,
    task_id_of,
)


def add_episode_routes(app: GuardedApp, plane: DataPlane) -> None:
    """Add the workers' routes; a job that serves a model answers all of them with 409."""
    episodes, tasks_of_job = plane.store.episodes, plane.store.tasks
    route = episode_routes(app, plane, "episodes")
    _add_reading_routes(route, plane)

    @route("/tasks", PushTasks)
    async def push_tasks(request: Request) -> TasksPushed:
        """Add tasks in chunks, which are safe to repeat; `final` marks the last chunk and starts the job."""
        require_job(request)
        body, tasks = await read_with(
            partial(_pushed, plane.config.algorithm_of(plane.config.players.default)), request, plane.pool
        )
        total = await tasks_of_job.push(body.split, tasks, body.chunk_id)
        if body.final:
            await tasks_of_job.seal()
        return TasksPushed(split=body.split, total=total)

    @route("/register_episode", RegisterEpisode)
    async def register_episode(request: Request) -> EpisodeRegistered:
        """Register an episode outside the schedule: recorded, never trained on, and claimed by its id."""
        require_job(request)
        body = await read_request(RegisterEpisode, request, plane.pool)
        task = Task(task_id=task_id_of(body.task), data=body.task.data)
        return EpisodeRegistered(episode_id=await episodes.register_adhoc(task, body.request_id))

    @route("/claim_episode", ClaimEpisode)
    async def claim_episode(request: Request) -> ClaimAnswer:
        """Claim the next episode, or with `role` a player slot, waiting up to `wait_seconds`.

        Repeating the request returns the same episode. The role's own key also claims its slot.
        """
        body = await read_request(ClaimEpisode, request, plane.pool)
        if body.role is not None:
            return await claim_seat(plane, body, body.role, request)
        require_job(request)
        plane.workers.mark_claiming(body.worker_id, body.request_id)
        try:
            episode = await until_disconnect(request.scope, _claim(plane, body, request))
        finally:
            plane.workers.mark_answered(body.worker_id, body.request_id)
        if episode is not None:
            plane.workers.mark_playing(body.worker_id, episode.episode_id, episode.fence)
            return ClaimAnswer(status="claimed", episode=_claimed(plane, episode, request), job_state=_state(plane))
        if plane.progress.over:
            plane.workers.mark_notified(body.worker_id, body.request_id)
        return ClaimAnswer(status="finished" if plane.progress.over else "waiting", job_state=_state(plane))

    @route("/heartbeat_episode", HeartbeatEpisode)
    async def heartbeat_episode(request: Request) -> EpisodeAnswer:
        """Renew the lease of the episode, or with a player slot's key of the slot. Every model call renews it too."""
        body = await read_request(HeartbeatEpisode, request, plane.pool)
        key = await require_episode(request, body.episode_id, episodes)
        await _renew(plane, key)
        return EpisodeAnswer(episode_id=key.episode_id, state="claimed")

    @route("/end_episode", EndEpisode)
    async def end_episode(request: Request) -> EpisodeAnswer:
        """Submit the reward; the answer is sent when it is on disk. Repeating the same body returns the same answer."""
        body = await read_request(EndEpisode, request, plane.pool)
        key = await require_episode(request, body.episode_id, episodes)
        _check_ends(key)
        roles = plane.sessions.context.policies.roles
        rewards = _rewards(body, plane.config.algorithm_of(roles.policy_of(SOLE_AGENT)))
        _check_owners(body, rewards, plane.config)
        earned = None if body.agent_step_rewards is None else [AgentStepReward(*one) for one in body.agent_step_rewards]
        plane.workers.mark_finished(key.episode_id, key.fence)
        await episodes.end(
            key.episode_id,
            key.fence,
            EpisodeEnd(
                rewards=rewards,
                step_rewards=body.step_rewards,
                metadata=body.metadata,
                step_times=None if body.step_times is None else [StepTimes(*one) for one in body.step_times],
                named_rewards=body.named_rewards,
                agent_step_rewards=earned,
                facts=(body.facts or {}) | _ended_by(body),
            ),
        )
        return EpisodeAnswer(episode_id=key.episode_id, state="completed")

    @route("/abort_episode", AbortEpisode)
    async def abort_episode(request: Request) -> EpisodeAnswer:
        """Give the episode back after a failure that is not the policy's fault: no reward is recorded, and nothing is
        trained.

        A player slot's key gives back only the slot; `seats.takeover` decides what happens to it.
        """
        body = await read_request(AbortEpisode, request, plane.pool)
        key = await require_episode(request, body.episode_id, episodes)
        await _give_back(plane, key, body)
        return EpisodeAnswer(episode_id=key.episode_id, state=(await episodes.get(key.episode_id)).state)


def _ended_by(body: EndEpisode) -> dict[str, str]:
    """Return the fact of what ended an episode that did not come to its own end."""
    if body.forfeit:
        return {"termination": FORFEIT}
    return {"termination": MAX_STEPS} if body.truncated else {}


def _add_reading_routes(route: Route, plane: DataPlane) -> None:
    @route("/rollout", None)
    async def rollout(request: Request) -> RolloutFacts:
        """Return the facts about the job that a worker needs before it plays an environment."""
        require_job(request)
        return _facts(plane)

    @route("/episode_calls", None)
    async def episode_calls(request: Request) -> EpisodeCalls:
        """Count the model calls of the episode whose key opens this route."""
        key = caller_of(request)
        if not isinstance(key, EpisodeKey):
            raise Forbidden("this is not the key of an episode")
        found = await plane.store.calls.summary(key.episode_id, key.fence)
        refused = plane.store.leases.refused(key.episode_id, key.fence)
        return EpisodeCalls(
            answered=found.calls, sampled_tokens=found.sampled_tokens, answer=found.answer, refused=refused
        )


async def _renew(plane: DataPlane, key: EpisodeKey | SeatKey) -> None:
    """Renew the lease of a key: an episode's or a player slot's."""
    if isinstance(key, SeatKey):
        plane.seats.table(key).renew(key.role, key.seat_fence)
    else:
        await plane.store.episodes.renew(key.episode_id, key.fence)


def _check_ends(key: EpisodeKey | SeatKey) -> None:
    """Raise Forbidden for a player slot's key, which cannot end the episode."""
    if isinstance(key, SeatKey):
        raise Forbidden("this is the key of a seat; the environment ends its episode, with the rewards of all seats")


async def _give_back(plane: DataPlane, key: EpisodeKey | SeatKey, body: AbortEpisode) -> None:
    """Give back an episode or a player slot, depending on the key."""
    if isinstance(key, SeatKey):
        plane.seats.leave(key)
        return
    plane.workers.mark_finished(key.episode_id, key.fence)
    reason = body.reason or "given back by its worker"
    await plane.store.episodes.abort(key.episode_id, key.fence, reason, body.discard)


def _pushed(algorithm: AlgorithmConfig, body: bytes) -> tuple[PushTasks, list[Task]]:
    """Return a request and its tasks."""
    pushed = parse_body(PushTasks, body)
    tasks = [Task(task_id=task_id_of(task), data=task.data) for task in pushed.tasks]
    if algorithm.learns_conversations and pushed.split == "train":
        for place, task in enumerate(tasks):
            try:
                read_conversations(task, pairs=algorithm.learns_pairs)
            except ConfigError as error:
                raise InvalidRequest(str(error), f"tasks.{place}.data") from None
    return pushed, tasks


async def _claim(plane: DataPlane, body: ClaimEpisode, request: Request) -> EpisodeRecord | None:
    """Wait for an episode; None: the waiting time or the job is over."""
    clock, episodes = plane.store.clock, plane.store.episodes
    until = clock.monotonic() + min(body.wait_seconds, MAX_WAIT_SECONDS)
    while True:
        plane.keys.recheck(request)
        if plane.progress.over and body.episode_id is None:
            return None
        if plane.stopping.is_set():
            raise ServerStopping("the server is going down; it may come back")
        seen, asked_at = episodes.available.count, clock.monotonic()
        episode = await episodes.claim(body.worker_id, body.request_id, body.allow_discard_timeout, body.episode_id)
        if episode is not None:
            plane.keys.recheck(request)
            # Not for a claim that is sent again, perhaps after a restart: its lease may have calls in the store.
            if plane.store.leases.granted_since(episode.episode_id, episode.fence, asked_at):
                await plane.sessions.begin(episode)
            return episode
        left = until - clock.monotonic()
        if left <= 0:
            return None
        plane.connections.check_capacity()
        await episodes.available.wait(left, seen)


def _claimed(plane: DataPlane, episode: EpisodeRecord, request: Request) -> ClaimedEpisode:
    """Return everything a worker needs to play an episode, with the versions that the engine samples from now."""
    policies = plane.sessions.context.policies
    default, versions = policies.roles.default, {name: str(version) for name, version in policies.versions.items()}
    played = policies.runtime(default).config
    return ClaimedEpisode(
        episode_id=episode.episode_id,
        kind=episode.kind,
        task_id=episode.task.task_id,
        task=episode.task.data,
        base_url=f"{request.base_url}v1",
        api_key=plane.keys.episode_key(episode.episode_id, episode.fence),
        model=default,
        version=versions[default],
        policies=versions,
        max_context=played.max_context,
        max_tokens=played.sampling.max_tokens,
        players=episode.players,
        lease_seconds=episode.lease_seconds,
    )


def _facts(plane: DataPlane) -> RolloutFacts:
    """Return the facts about the job that a worker needs to play an environment."""
    config, roles = plane.config, plane.sessions.context.policies.roles
    chosen = config.environment
    return RolloutFacts(
        seed=config.seed,
        default=roles.default,
        roles=dict(roles.named),
        frozen=tuple(sorted(roles.frozen)),
        rivals=roles.rivals,
        reward_weights={name: dict(config.algorithm_of(name).reward_weights) for name in config.policies},
        credits_agents=config.algorithm_of(roles.default).credits_agents,
        environment=chosen.full_name,
        settings=chosen.settings,
        agent=chosen.agent,
        agent_settings=chosen.agent_settings,
        system=chosen.system,
        timeout_seconds=config.rollout.timeout_seconds,
        max_picture_bytes=min(MAX_PICTURE_BYTES, config.server.max_body_bytes),
    )


def _state(plane: DataPlane) -> str:
    return plane.progress.state.value


def _check_owners(body: EndEpisode, rewards: Mapping[str, float], config: JobConfig) -> None:
    """Raise an error for TimeStep rewards without owners where the algorithm needs them."""
    if body.step_rewards is None or body.agent_step_rewards is not None or len(rewards) < 2:
        return
    credits = {getattr(config.algorithm_of(policy), "credit", None) for policy in config.trained_policies}
    if "step" in credits or (config.players.rivals and "team-step" in credits):
        raise InvalidRequest(
            f"step_rewards does not say which of {', '.join(sorted(rewards))} has earned what, and each is credited "
            "with its own rewards by time; give rewards of TimeSteps by agent (step_rewards = [{agent: reward}, …] of "
            "a client, or agent_step_rewards), or leave step_rewards out",
            "step_rewards",
        )


def _rewards(body: EndEpisode, algorithm: AlgorithmConfig) -> dict[str, float]:
    """Return the rewards of an episode by agent."""
    given = [body.reward is not None, body.rewards is not None, body.named_rewards is not None]
    if not any(given) or (given[0] and any(given[1:])):
        raise InvalidRequest("give either reward, rewards or named_rewards", "reward")
    if body.named_rewards is not None:
        if all(value is None for value in body.named_rewards.values()):
            raise InvalidRequest("no named reward is scored; discard the episode with /abort_episode", "named_rewards")
        total = algorithm.weighted_sum(body.named_rewards)
        if not abs(total) <= MAX_REWARD:  # also where the total is not a number
            raise InvalidRequest(
                f"the sum of the named rewards, times algorithm.reward_weights, is {total:g}, and a reward is from "
                f"{-MAX_REWARD:,.0f} to {MAX_REWARD:,.0f}",
                "named_rewards",
            )
        return body.rewards or {SOLE_AGENT: total}
    return body.rewards if body.rewards is not None else {SOLE_AGENT: float(body.reward or 0.0)}
