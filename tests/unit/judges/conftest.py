"""Fixtures of the judges' tests."""

from __future__ import annotations

import pytest

from palestra_judges import model


@pytest.fixture
def asked_once(monkeypatch):
    """Let judges ask each question once, without a retry."""
    monkeypatch.setattr(model, "RETRIES", 0)
