"""What happens between a call and its tokens: nobody but the session touches ids."""

from palestra.session.context import PolicyRuntime, SessionContext
from palestra.session.session import EpisodeSession, ModelCall
from palestra.session.sessions import Sessions

__all__ = ["EpisodeSession", "ModelCall", "PolicyRuntime", "SessionContext", "Sessions"]
