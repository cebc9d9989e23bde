"""Sessions: everything between an agent's request and its tokens. No other room builds prompts or reads sampled ids."""

from palestra.session.context import SessionContext
from palestra.session.history import Sameness
from palestra.session.policies import PolicyRuntime, PolicySet
from palestra.session.request import CallStart, GenerationRequest, Listener, ReplyPiece
from palestra.session.session import EpisodeSession, Session, StatelessSession
from palestra.session.sessions import Sessions

__all__ = [
    "CallStart",
    "EpisodeSession",
    "GenerationRequest",
    "Listener",
    "PolicyRuntime",
    "PolicySet",
    "ReplyPiece",
    "Sameness",
    "Session",
    "SessionContext",
    "Sessions",
    "StatelessSession",
]
