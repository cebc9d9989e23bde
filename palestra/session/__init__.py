"""What happens between a call and its tokens: nobody but the session touches ids."""

from palestra.session.context import PolicyRuntime, SessionContext
from palestra.session.history import Sameness
from palestra.session.request import CallStart, GenerationRequest, Listener, ReplyPiece
from palestra.session.session import EpisodeSession, Session, StatelessSession
from palestra.session.sessions import Sessions

__all__ = [
    "CallStart",
    "EpisodeSession",
    "GenerationRequest",
    "Listener",
    "PolicyRuntime",
    "ReplyPiece",
    "Sameness",
    "Session",
    "SessionContext",
    "Sessions",
    "StatelessSession",
]
