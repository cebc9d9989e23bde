"""Files that users write: with a byte order mark, and under any locale."""

from __future__ import annotations

import ast
from codecs import BOM_UTF8
from pathlib import Path

import pytest

import palestra
from palestra.client.task_files import read_task_file
from palestra.config.loading import load_config
from palestra.errors import ConfigError
from palestra.http.bodies import parse_body
from palestra.types.wire import TaskBody
from palestra_bases.connection import KEY, KEY_FILE, base_key
from palestra_bases.tenant_keys import Tenants
from palestra_lab.config import load_comparison
from palestra_remote.command import _key as environment_key
from palestra_service.jobs.rules import load_rules


def written(path: Path, text: str) -> Path:
    path.write_bytes(BOM_UTF8 + text.encode())
    return path


def test_a_job_with_a_byte_order_mark(tmp_path):
    assert load_config(written(tmp_path / "job.toml", 'model = "ä"\r\n')).policies["policy"].model == "ä"


def test_tasks_with_byte_order_marks(tmp_path):
    first = written(tmp_path / "a.jsonl", '{"prompt": "a"}\r\n').read_bytes()
    (tmp_path / "both.jsonl").write_bytes(first + first)
    assert read_task_file(tmp_path / "both.jsonl") == [{"prompt": "a"}] * 2


def test_a_comparison_and_rules_with_a_byte_order_mark(tmp_path):
    with pytest.raises(ConfigError, match="scenarios"):  # it was read, and is not whole
        load_comparison(written(tmp_path / "compare.toml", "seeds = [1]\n"))
    assert load_rules(written(tmp_path / "rules.toml", "hub_models = false\n")).hub_models is False


@pytest.mark.parametrize("load", [load_config, load_comparison, load_rules])
@pytest.mark.parametrize("content", [b"\xff\xfea\x00", b"name = \xe4", b"name ="])
def test_what_is_no_toml_is_one_line(tmp_path, load, content):
    (tmp_path / "a.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.toml.*TOML"):
        load(tmp_path / "a.toml")
    with pytest.raises(ConfigError, match="no such"):
        load(tmp_path / "b.toml")


def test_keys_with_a_byte_order_mark(tmp_path, monkeypatch):
    monkeypatch.delenv(KEY, raising=False)
    monkeypatch.setenv(KEY_FILE, str(written(tmp_path / "key", "secret\n")))
    assert base_key() == "secret"
    assert environment_key(tmp_path / "key") == ("secret", False)
    (tmp_path / "key").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError):
        base_key()
    with pytest.raises(ConfigError):
        environment_key(tmp_path / "key")
    keys = tmp_path / "keys"
    keys.mkdir()
    written(keys / "default", f"tml-{'a' * 48}\n")
    assert Tenants(keys, ["default"], prefix="tml-").files == [keys / "default"]


def test_a_request_body_with_a_byte_order_mark():
    assert parse_body(TaskBody, BOM_UTF8 + b'{"data": {"a": 1}}').data == {"a": 1}


def test_no_text_is_read_or_written_in_the_encoding_of_the_locale():
    missing = [
        f"{path}:{node.lineno}"
        for path in Path(palestra.__file__).parents[1].glob("palestra*/**/*.py")
        if "_text(" in (source := path.read_text())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("read_text", "write_text")
        and not any(keyword.arg == "encoding" for keyword in node.keywords)
    ]
    assert missing == []
