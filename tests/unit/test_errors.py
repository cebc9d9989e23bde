from __future__ import annotations

import importlib.util
import inspect
import re

import pytest

from palestra import errors
from palestra.errors import PalestraError
from palestra_worlds.gymnasium import GymnasiumEnvironment

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, PalestraError)]


def example(kind: type[PalestraError]) -> PalestraError:
    if kind is errors.HistoryDrift:
        return kind("edited_message", 3, 4, 212)
    if kind is errors.ControlTokenInText:
        return kind("a message of role user", "<|im_end|>")
    if kind is errors.RolloutFailed:
        return kind("timed_out", "not over after 3 s")
    return kind(5000, 4096) if kind is errors.ContextOverflow else kind("what happened")


@pytest.mark.parametrize("kind", CLASSES)
def test_the_code_is_the_name_in_snake_case(kind):
    words = re.findall(r"[A-Z][a-z]+", kind.__name__)
    assert example(kind).code == "_".join(word.lower() for word in words)


def test_codes_are_distinct():
    assert len({example(kind).code for kind in CLASSES}) == len(CLASSES)


def test_what_may_succeed_later_is_429_or_503_and_nothing_else():
    assert {c.__name__ for c in CLASSES if c.retryable} == {c.__name__ for c in CLASSES if c.http_status in (429, 503)}


def test_drift_says_what_was_left_where_and_why():
    error = errors.HistoryDrift("edited_message", 3, 4, 212)
    assert "call 3: edited message" in str(error)
    assert "message 4, at token 212" in str(error)
    assert "an earlier call" in str(errors.HistoryDrift("tools_changed", None, 0, 0))


def test_a_context_overflow_says_both_numbers():
    error = errors.ContextOverflow(5000, 4096)
    assert "5000" in str(error)
    assert "4096" in str(error)
    assert (error.prompt_tokens, error.max_context) == (5000, 4096)


def test_an_invalid_request_names_its_field():
    assert errors.InvalidRequest("no", "reward").field == "reward"
    assert errors.InvalidRequest("no").field is None


def test_the_place_of_an_error_is_in_no_installed_package_wherever_it_is_installed(tmp_path):
    package = tmp_path / "elsewhere" / "site-packages" / "sdk.py"
    package.parent.mkdir(parents=True)
    package.write_text("def request(): raise ValueError('refused')\n")
    spec = importlib.util.spec_from_file_location("sdk", package)
    assert spec is not None
    assert spec.loader is not None
    sdk = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sdk)

    with pytest.raises(ValueError, match="refused") as caught:
        sdk.request()
    assert errors.place_of(caught.value).startswith(" (test_errors.py:")


def test_nor_is_it_in_a_package_of_palestra():
    with pytest.raises(TypeError) as caught:
        GymnasiumEnvironment(lambda: None, unknown=1)
    assert errors.place_of(caught.value).startswith(" (test_errors.py:")
