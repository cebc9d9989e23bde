"""What happens between a call and its tokens: nobody but the session touches ids."""

from palestra.session.call import CallStart, Listener, ModelCall, ReplyPiece
from palestra.session.context import PolicyRuntime, SessionContext
from palestra.session.history import Sameness
from palestra.session.session import EpisodeSession
from palestra.session.sessions import Sessions

__all__ = [
    "CallStart",
    "EpisodeSession",
    "Listener",
    "ModelCall",
    "PolicyRuntime",
    "ReplyPiece",
    "Sameness",
    "SessionContext",
    "Sessions",
]
