"""Tasks that are pushed from a file."""

from __future__ import annotations

from contextlib import closing

import pytest

from palestra import AsyncClient, Client
from palestra.client.task_files import TaskFile, task_source
from palestra.errors import ConfigError


@pytest.fixture
def files(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"id": "a", "prompt": "x"}\n\n{"prompt": "y"}\n')
    (tmp_path / "held_out.jsonl").write_text('{"id": 7, "prompt": "z"}\n')
    (tmp_path / "bad.jsonl").write_text('{"id": "a"}\n[1]\n')
    return tmp_path


def test_tasks_can_be_read_several_times_whatever_they_come_from(files):
    rows = [{"id": "a", "prompt": "x"}, {"prompt": "y"}]
    for each in (files / "train.jsonl", str(files / "train.jsonl"), iter(rows), rows):
        with closing(task_source(each, "tasks")) as source:
            assert list(source) == list(source) == rows
            assert source.count() == 2


def test_what_is_wrong_in_a_file_is_said_with_its_line(files):
    def check(task):
        if task.get("prompt") == "y":
            raise ConfigError("no")

    with pytest.raises(ConfigError, match=r"train\.jsonl:3: no$"):
        TaskFile(files / "train.jsonl").count(check)


async def test_both_clients_push_the_tasks_of_files(files, monkeypatch):
    pushed = []

    def sent(settings, call):
        pushed.append(call.body)
        yield from ()

    monkeypatch.setattr("palestra.client.exchange.send_call", sent)
    async with AsyncClient("http://127.0.0.1:9", "key") as client:
        await client.push_tasks(str(files / "train.jsonl"), files / "held_out.jsonl")
    with Client("http://127.0.0.1:9", "key") as client:
        client.push_tasks(files / "train.jsonl", [{"id": 7, "prompt": "z"}])
        with pytest.raises(ConfigError, match=r"bad\.jsonl:2.*JSON"):
            client.push_tasks(files / "bad.jsonl")
    assert [(body.split, next(task.data["id"] for task in body.tasks)) for body in pushed] == [
        ("validation", 7),
        ("train", "a"),
    ] * 2
    assert pushed[1] == pushed[3]
