"""What text the control store takes: both databases can hold it, people can read it, and no key stands in it."""

from __future__ import annotations

import re

from palestra.errors import InvalidRequest

IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")  # of tenants and users
MAX_NAME = 128  # characters of what a person calls something
# Keys of users, and of jobs and episodes. What names a key stays; what opens something goes.
_SECRETS = re.compile(r"(pk_[0-9a-f]{12}_)[A-Za-z0-9_-]{8,}|(pj-|pe-[\w-]{1,64}\.\d{1,9}\.)[0-9a-f]{16,}", re.ASCII)
_NOT_STORED = re.compile("[\0\ud800-\udfff]")  # PostgreSQL has no NUL, and halves of a pair are not Unicode


def redact(text: str) -> str:
    """The text with every key in it made useless."""
    return _SECRETS.sub(lambda found: (found[1] or found[2]) + "[hidden]", text)


def has_secret(text: str) -> bool:
    """Whether a key stands in the text."""
    return _SECRETS.search(text) is not None


def clean(text: str, most: int) -> str:
    """What Palestra itself writes down, log lines among them: the last `most` characters, storable, without keys."""
    return _NOT_STORED.sub("\ufffd", redact(text))[-most:]


def can_match(text: str) -> bool:
    """Whether anything that is stored could equal this text; what could not is never sent to a database."""
    return len(text) <= MAX_NAME and _NOT_STORED.search(text) is None


def check_identifier(text: str, field: str) -> str:
    """A tenant's or user's name.

    Raises:
        InvalidRequest: it is none, or it is a key.
    """
    if IDENTIFIER.fullmatch(text) is None:
        raise InvalidRequest(
            f"a {field} has 1 to 64 letters, digits and . _ @ + -, and begins with a letter or digit", field
        )
    _refuse_secret(text, field)
    return text


def check_name(text: str, field: str, may_be_empty: bool = False) -> str:
    """What a person calls something: any writing, on one line.

    Raises:
        InvalidRequest: it is empty, too long, has control characters, or a key in it.
    """
    if not (len(text) <= MAX_NAME and text.isprintable() and (may_be_empty or text.strip())):
        raise InvalidRequest(f"{field} has to have 1 to {MAX_NAME} characters that can be printed", field)
    _refuse_secret(text, field)
    return text


def _refuse_secret(text: str, field: str) -> None:
    if has_secret(text):
        raise InvalidRequest(f"there is a key in {field}; revoke it, for it may have been seen", field)
