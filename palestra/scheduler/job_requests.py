"""The check of a submitted job before it is stored."""

from __future__ import annotations

import orjson

from palestra.database import to_json
from palestra.errors import InvalidRequest, PayloadTooLarge
from palestra.scheduler.stored_text import check_name, has_secret
from palestra.schemas.jobs import JOB_KINDS, PRIORITIES, JobRequest

MOST_CONFIG_BYTES = 256 * 1024
MOST_RESTARTS = 100
MOST_SECONDS = 1e10


def check_request(request: JobRequest) -> None:
    """Refuse a job that can't be stored unchanged.

    Raises:
        InvalidRequest: a value is out of range, or a text contains a key.
        PayloadTooLarge: the configuration is too long.
    """
    check_name(request.name, "name")
    if request.kind not in JOB_KINDS:
        raise InvalidRequest(f"kind has to be one of {', '.join(JOB_KINDS)}", "kind")
    if request.priority not in PRIORITIES:
        raise InvalidRequest(f"priority has to be one of {', '.join(PRIORITIES)}", "priority")
    if not 0 <= request.restarts_limit <= MOST_RESTARTS:
        raise InvalidRequest(f"restarts_limit has to be from 0 to {MOST_RESTARTS}", "restarts_limit")
    if request.time_limit_seconds is not None and not 0 < request.time_limit_seconds < MOST_SECONDS:
        raise InvalidRequest(f"time_limit_seconds has to be above 0 and below {MOST_SECONDS:g}", "time_limit_seconds")
    try:
        text = to_json(request.config)
        same = orjson.loads(text) == request.config  # they differ if there is a NaN, which orjson writes as null
    except (TypeError, ValueError, RecursionError):
        same, text = False, ""
    if not same:
        raise InvalidRequest("config has to be a JSON object, without NaN and infinities", "config")
    if len(text.encode()) > MOST_CONFIG_BYTES:
        raise PayloadTooLarge(f"config has {len(text.encode())} bytes; at most {MOST_CONFIG_BYTES} are kept")
    if has_secret(text):
        raise InvalidRequest("there is a key in config; revoke it, for it may have been seen", "config")
