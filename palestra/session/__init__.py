"""What happens between a call and its tokens: nobody but the session touches ids."""

from palestra.session.call import CallStart, GenerationRequest, Listener, ReplyPiece
from palestra.session.context import PolicyRuntime, SessionContext
from palestra.session.history import Sameness
from palestra.session.session import EpisodeSession
from palestra.session.sessions import Sessions

__all__ = [
    "CallStart",
    "EpisodeSession",
    "GenerationRequest",
    "Listener",
    "PolicyRuntime",
    "ReplyPiece",
    "Sameness",
    "SessionContext",
    "Sessions",
]
