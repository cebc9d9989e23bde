"""Sessions: everything between an agent's request and its tokens. No other package builds prompts or
reads sampled ids.
"""

from palestra.session.context import SessionContext
from palestra.session.history import Sameness
from palestra.session.policies import PolicyRuntime, PolicySet
from palestra.session.request import Listener, ReplyPiece
from palestra.session.seats import EpisodeKey, SeatBook, SeatClaim, SeatKey
from palestra.session.session import EpisodeSession, Session, StatelessSession
from palestra.session.sessions import CallMaker, SeatSession, Sessions

__all__ = [
    "CallMaker",
    "EpisodeKey",
    "EpisodeSession",
    "Listener",
    "PolicyRuntime",
    "PolicySet",
    "ReplyPiece",
    "Sameness",
    "SeatBook",
    "SeatClaim",
    "SeatKey",
    "SeatSession",
    "Session",
    "SessionContext",
    "Sessions",
    "StatelessSession",
]
