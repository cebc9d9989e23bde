"""The routes of the Tinker API: `/api/v1` as the SDK calls it.

A request to a model or a sampler is answered with the id of a future; its result is requested with `retrieve_future`.
Failures of such requests are results too; requests that are refused immediately have a status of 400 or more.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from palestra.errors import Expired, InvalidRequest, NotFound, UnsupportedField
from palestra.http.app import PUBLIC, build_app
from palestra.http.bodies import parse_body, read_request, read_with
from palestra.http.errors import Failure
from palestra.http.guard import bearer
from palestra.threads import WorkPool
from palestra_bases.tenant_keys import Tenants
from palestra_bases.tinker import protobuf
from palestra_bases.tinker.listing import API, FILES, Links, add_downloads, add_listing, json_answer
from palestra_bases.tinker.records import TinkerLimits
from palestra_bases.tinker.service import TinkerService
from palestra_bases.tinker.tables import DONE, FAILED, FORGOTTEN, PENDING
from palestra_bases.tinker.wire import (
    CopyWeights,
    CreateSession,
    InOrder,
    JoinSampler,
    OfFutures,
    OfModel,
    OfRequest,
    OfSession,
    Sample,
    TinkerFinish,
)

_PROTOBUF_RESULTS = ("forward_backward", "sample")  # kinds of requests
GONE = 410
_TOKEN = "x-tinker-weights-access-token"


def tinker_error(failure: Failure) -> dict[str, Any]:
    """Return the body of an error, with the keys of a failed future."""
    category = "server" if failure.status >= 500 else "user"
    return {"error": failure.message, "category": category, "code": failure.code, "field": failure.field}


class TinkerTenants:
    """Identifies the tenant of a request by its key."""

    def __init__(self, tenants: Tenants, limits: TinkerLimits, links: Links) -> None:
        self._tenants, self._limits, self.links, self.pool = tenants, limits, links, WorkPool()

    def tenant(self, request: Request) -> str:
        """Return the tenant of a request's key."""
        return self._tenants.of(bearer(request))

    async def authenticate(self, request: Request) -> int:
        """Check the key or link of a request, and return the limit of its body; see `RequestGuard`."""
        if request.url.path.startswith(FILES):
            self.links.tenant(request)
        else:
            self.tenant(request)
        limits = self._limits
        return limits.body_bytes if request.url.path == f"{API}/forward_backward" else limits.json_bytes


def create_tinker_app(service: TinkerService, tenants: Tenants) -> FastAPI:
    """Return the application with all routes."""
    caller = TinkerTenants(tenants, service.limits, Links(tenants, service.saved.clock))
    app = build_app(
        "Palestra, Tinker API",
        "Training and sampling of LoRA adapters, as the Tinker SDK asks for them.",
        caller.authenticate,
        service.limits.body_bytes,
        public=(*PUBLIC, f"{API}/healthz"),
        error_forms={API: tinker_error},
    )
    _add_sessions(app, service, caller)
    _add_training(app, service, caller)
    _add_info(app, service, caller)
    _add_sampling(app, service, caller)
    _add_futures(app, service, caller)
    add_downloads(app, service.saved, caller.links, caller.tenant)  # before the routes of paths of any length
    add_listing(app, service, caller.tenant)
    _add_unknown(app)
    return app


def _add_sessions(app: FastAPI, service: TinkerService, caller: TinkerTenants) -> None:
    @app.get(f"{API}/healthz")
    async def healthz() -> Response:
        """Say that the server answers; this needs no key."""
        return json_answer({"status": "ok"})

    @app.post(f"{API}/client/config")
    async def client_config(request: Request) -> Response:
        """Return which optional parts of the protocol are enabled, to save client requests."""
        return json_answer({"sample_use_retrieve_futures": True, "sample_join_sampling_session": True})

    @app.post(f"{API}/client/dynamic_config")
    async def dynamic_config(request: Request) -> Response:
        """Return an unchanged dynamic configuration."""
        return json_answer({"refresh_interval_sec": 300})

    @app.post(f"{API}/telemetry")
    async def telemetry(request: Request) -> Response:
        """Accept a client's telemetry, and drop it."""
        return json_answer({"status": "accepted"})

    @app.post(f"{API}/create_session")
    async def create_session(request: Request) -> Response:
        """Begin a session, in which a client creates models and samplers."""
        body = await read_request(CreateSession, request, caller.pool)
        session_id = await service.create_session(caller.tenant(request), body.model_dump(mode="json"))
        return json_answer({"type": "create_session", "session_id": session_id})

    @app.post(f"{API}/session_heartbeat")
    async def heartbeat(request: Request) -> Response:
        """Keep a session alive; 410 where it is finished."""
        body = await read_request(OfSession, request, caller.pool)
        alive = await service.heartbeat(caller.tenant(request), body.session_id)
        if not alive:
            gone = Failure(status=GONE, message="the session is finished", code="finished")
            return json_answer(tinker_error(gone), GONE)
        return json_answer({"type": "session_heartbeat"})

    @app.post(f"{API}/sessions/{{session_id}}/finish")
    async def finish(session_id: str, request: Request) -> Response:
        """End a session that its client has closed."""
        await read_request(TinkerFinish, request, caller.pool)
        await service.finish_session(caller.tenant(request), session_id)
        return json_answer({})

    @app.get(f"{API}/get_server_capabilities")
    async def capabilities() -> Response:
        """List the base models, with their longest contexts."""
        found = [
            {"model_name": b.name, "max_context_length": b.max_context, "trainable": True, "sampleable": True}
            for b in service.bases.values()
        ]
        return json_answer({"supported_models": found})


def _add_training(app: FastAPI, service: TinkerService, caller: TinkerTenants) -> None:
    def accepted(request_id: str, model_id: str) -> Response:
        return json_answer({"request_id": request_id, "model_id": model_id})

    @app.post(f"{API}/create_model")
    async def create_model(request: Request) -> Response:
        """Make an adapter of a base model."""
        return accepted(*await service.models.create(caller.tenant(request), await request.body()))

    @app.post(f"{API}/load_weights")
    async def load_weights(request: Request) -> Response:
        """Load a checkpoint, as a new model or into one that is there."""
        return accepted(*await service.models.load(caller.tenant(request), await request.body()))

    @app.post(f"{API}/forward_backward")
    async def forward_backward(request: Request) -> Response:
        """Compute logprobs, and add a gradient unless only they are wanted."""
        if request.headers.get("content-encoding", "identity") != "identity":
            raise UnsupportedField("compressed bodies are not read here; client/config says so", "content-encoding")
        if not request.headers.get("content-type", "").startswith(protobuf.CONTENT_TYPE):
            raise UnsupportedField(f"forward_backward takes {protobuf.CONTENT_TYPE}", "content-type")
        body = await request.body()
        model_id, seq_id = await read_with(_whose, request, caller.pool)
        return accepted(
            await service.models.train(caller.tenant(request), "forward_backward", model_id, seq_id, body), model_id
        )

    def add_in_order(route: str, kind: str) -> None:
        @app.post(f"{API}/{route}", name=route)
        async def in_order(request: Request) -> Response:
            """Have a request executed when all before it are."""
            asked = await read_request(InOrder, request, caller.pool)
            body = await request.body()
            request_id = await service.models.train(caller.tenant(request), kind, asked.model_id, asked.seq_id, body)
            return accepted(request_id, asked.model_id)

    add_in_order("optim_step", "optim_step")
    add_in_order("save_weights", "save_weights")
    add_in_order("save_weights_for_sampler", "save_for_sampler")
    add_in_order("save_weights_external", "save_external")


def _add_info(app: FastAPI, service: TinkerService, caller: TinkerTenants) -> None:
    @app.post(f"{API}/get_info")
    async def get_info(request: Request) -> Response:
        """Return a model's base model and rank."""
        asked = await read_request(OfModel, request, caller.pool)
        record = await service.sessions.model(caller.tenant(request), asked.model_id)
        base = service.bases.of(record.base)
        model = {"arch": base.architecture, "model_name": base.name, "tokenizer_id": base.tokenizer_id}
        return json_answer(
            {
                "type": "get_info",
                "model_id": record.model_id,
                "model_data": model,
                "optimizer_config": {"type": "adamw"},
                "is_lora": True,
                "lora_rank": record.adapter.rank,
                "model_name": base.name,
            }
        )

    @app.post(f"{API}/copy_weights")
    async def copy_weights(request: Request) -> Response:
        """Copy a checkpoint, under a path of the key's own."""
        asked = await read_request(CopyWeights, request, caller.pool)
        if asked.weights_access_token is not None or _TOKEN in request.headers:
            raise UnsupportedField(
                "weights_access_token is not supported here: a key copies its own checkpoints, and those that another "
                "has published",
                "weights_access_token",
            )
        path = await service.copies.copy(caller.tenant(request), asked, request.headers.get("x-idempotency-key"))
        return json_answer({"tinker_path": path})

    @app.post(f"{API}/create_custom_loss")
    async def create_custom_loss(request: Request) -> Response:
        """Refuse custom losses: code from clients is never executed."""
        raise UnsupportedField("create_custom_loss is not supported here: losses run in the client", None)


def _whose(body: bytes) -> tuple[str, int]:
    """Return the model and the number of a message `ForwardBackwardRequest`."""
    request = protobuf.parse("ForwardBackwardRequest", body)
    if request.seq_id < 1 or not request.model_id:
        raise InvalidRequest("model_id and a seq_id from 1 have to be given", "seq_id")
    return request.model_id, request.seq_id


def _add_sampling(app: FastAPI, service: TinkerService, caller: TinkerTenants) -> None:
    @app.post(f"{API}/create_sampling_session")
    async def create_sampling_session(request: Request) -> Response:
        """Begin to sample from a base model or a checkpoint."""
        sampler = await service.samples.create(caller.tenant(request), await request.body())
        return json_answer({"type": "create_sampling_session", "sampling_session_id": sampler.sampler_id})

    @app.post(f"{API}/join_sampling_session")
    async def join_sampling_session(request: Request) -> Response:
        """Give one more client of a sampler a number of its own."""
        asked = await read_request(JoinSampler, request, caller.pool)
        number = await service.saved.join_sampler(caller.tenant(request), asked.sampling_session_id)
        return json_answer({"type": "join_sampling_session", "client_counter": number})

    @app.get(f"{API}/samplers/{{sampler_id}}")
    async def get_sampler(sampler_id: str, request: Request) -> Response:
        """Return what a sampler samples from."""
        found = await service.saved.sampler(caller.tenant(request), sampler_id)
        return json_answer({"sampler_id": found.sampler_id, "base_model": found.base, "model_path": found.model_path})

    @app.post(f"{API}/asample")
    async def asample(request: Request) -> Response:
        """Have replies to a prompt sampled; the result is a future."""
        asked = await read_request(Sample, request, caller.pool)
        request_id = await service.samples.accept(caller.tenant(request), asked, await request.body())
        ids = [f"{request_id}:{number}" for number in range(asked.num_samples)]
        return json_answer({"request_id": request_id, "sample_sequence_ids": ids})


def _add_futures(app: FastAPI, service: TinkerService, caller: TinkerTenants) -> None:
    @app.post(f"{API}/retrieve_future")
    async def retrieve_future(request: Request) -> Response:
        """Return a result, after waiting for it for some time."""
        asked = parse_body(OfRequest, await request.body())
        found = await service.futures.result(caller.tenant(request), asked.request_id, service.limits.poll_seconds)
        if found.state == PENDING:
            return json_answer({"type": "try_again", "request_id": found.request_id, "queue_state": "active"})
        if found.state == FORGOTTEN or found.result is None:
            raise Expired(
                f"the result of {found.request_id} is gone: the newest {service.limits.futures} of a key are kept, "
                f"for {service.limits.future_seconds:g} s"
            )
        if found.state == DONE and found.kind in _PROTOBUF_RESULTS:
            return Response(found.result, media_type=protobuf.CONTENT_TYPE)
        return Response(found.result, media_type="application/json")

    @app.post(f"{API}/retrieve_futures")
    async def retrieve_futures(request: Request) -> Response:
        """Return which requests to a sampler have results, waiting for one for some time."""
        asked = parse_body(OfFutures, await request.body())
        sampler = await service.saved.sampler(caller.tenant(request), asked.target.sampling_session_id)
        usual = service.limits.poll_seconds
        seconds = usual if asked.timeout is None else min(asked.timeout, usual)
        clone = asked.target.cloned_sampler_id
        found = await service.futures.completions(sampler.sampler_id, clone, asked.prev_cursor, seconds)
        completions = [
            {"state": "failed", "request_id": one.request_id}
            if one.state == FAILED
            else {"state": "finished", "request_id": one.request_id, "response_payload_uncompressed_size": one.size}
            for one in found
        ]
        return json_answer(
            {"completions": completions, "cursor": max((one.place for one in found), default=asked.prev_cursor)}
        )

    @app.post(f"{API}/cancel_future")
    async def cancel_future(request: Request) -> Response:
        """Cancel a sampling request, whose future then fails."""
        asked = parse_body(OfRequest, await request.body())
        await service.samples.cancel(caller.tenant(request), asked.request_id)
        return json_answer({})


def _add_unknown(app: FastAPI) -> None:
    """Add a catch-all route, which must be the last."""

    @app.api_route(f"{API}/{{path:path}}", methods=["GET", "POST", "PUT", "DELETE"], include_in_schema=False)
    async def unknown(path: str, request: Request) -> Response:
        """Say that there is no such route."""
        raise NotFound(f"{request.method} {API}/{path} is not supported here")
