"""Retrieval: a tool that finds passages by meaning, and questions that can be answered with it alone."""

from palestra_worlds.retrieval.environment import RetrievalEnvironment, retrieval_tasks
from palestra_worlds.retrieval.search import PassageSearch

__all__ = ["PassageSearch", "RetrievalEnvironment", "retrieval_tasks"]
