"""Text for the control store: storable in both databases, readable, and without keys."""

from __future__ import annotations

import re

import orjson

from palestra.database import to_json
from palestra.errors import InvalidRequest, PayloadTooLarge
from palestra_control.jobs import JOB_KINDS, PRIORITIES, JobRequest

IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")  # names of tenants and users
MAX_NAME = 128  # characters of a name that a person chose
# Keys of users, jobs and episodes. Redaction keeps the part that names a key and removes the secret.
_SECRETS = re.compile(r"(pk_[0-9a-f]{12}_)[A-Za-z0-9_-]{8,}|(pj-|pe-[\w-]{1,64}\.\d{1,9}\.)[0-9a-f]{16,}", re.ASCII)
_NOT_STORED = re.compile("[\0\ud800-\udfff]")  # PostgreSQL has no NUL, and halves of a pair are not Unicode


MOST_CONFIG_BYTES = 256 * 1024
MOST_RESTARTS = 100
MOST_SECONDS = 1e10


def redact(text: str) -> str:
    """Return the text with the secret part of every key replaced."""
    return _SECRETS.sub(lambda found: (found[1] or found[2]) + "[hidden]", text)


def has_secret(text: str) -> bool:
    """Return whether the text contains a valid key."""
    return _SECRETS.search(text) is not None


def clean(text: str, most: int) -> str:
    """Return the last `most` characters of Palestra's own text, such as log lines, storable and without keys."""
    return _NOT_STORED.sub("\ufffd", redact(text))[-most:]


def can_match(text: str) -> bool:
    """Return whether any stored text could equal this one; otherwise it is never sent to a database."""
    return len(text) <= MAX_NAME and _NOT_STORED.search(text) is None


def check_identifier(text: str, field: str) -> str:
    """Return a valid name of a tenant or user."""
    if IDENTIFIER.fullmatch(text) is None:
        raise InvalidRequest(
            f"a {field} has 1 to 64 letters, digits and . _ @ + -, and begins with a letter or digit", field
        )
    _refuse_secret(text, field)
    return text


def check_name(text: str, field: str, may_be_empty: bool = False) -> str:
    """Return a valid name that a person chose: any script, on one line."""
    if not (len(text) <= MAX_NAME and text.isprintable() and (may_be_empty or text.strip())):
        raise InvalidRequest(f"{field} has to have 1 to {MAX_NAME} characters that can be printed", field)
    _refuse_secret(text, field)
    return text


def _refuse_secret(text: str, field: str) -> None:
    if has_secret(text):
        raise InvalidRequest(f"there is a key in {field}; revoke it, for it may have been seen", field)


def check_request(request: JobRequest) -> None:
    """Raise an error for a job that cannot be stored unchanged. Raises InvalidRequest if a value is out of range, or a
    text contains a key. Raises PayloadTooLarge if the configuration is too long.
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
