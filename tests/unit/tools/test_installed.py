"""Tools that packages bring, found by real metadata of a package on the path."""

from __future__ import annotations

import pytest

from palestra.errors import ConfigError
from palestra.tools import Calculator, installed_tools, load_tool
from palestra_mcp import McpServer


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "weather_tools.py").write_text(
        "from palestra.tools import tool\nfrom palestra_mcp import McpServer\n\n\n@tool\n"
        "def weather(city: str) -> str:\n"
        '    """Say the weather."""\n    return f"{city}: cold"\n\n\n'
        "def server():\n    return McpServer('http://127.0.0.1:1/mcp')\n\n\nnumber = 3\n"
    )
    folder = tmp_path / "weather_tools-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: weather-tools\nVersion: 1.0\n")
    named = {"weather": "weather", "station": "server", "broken": "missing", "number": "number"}
    lines = [f"{name} = weather_tools:{attribute}" for name, attribute in named.items()]
    (folder / "entry_points.txt").write_text("\n".join(["[palestra.tools]", *lines]))
    monkeypatch.syspath_prepend(str(tmp_path))


async def test_a_package_brings_tools_and_servers_of_tools(package):
    assert installed_tools() == ["calculator", "broken", "number", "station", "weather"]
    assert isinstance(load_tool("calculator"), Calculator)
    assert await load_tool("weather").apply_async(city="Bern") == "Bern: cold"
    assert isinstance(load_tool("station"), McpServer)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wether", r"'wether'.*'weather'"),
        ("broken", "weather_tools:missing"),
        ("number", "weather_tools:number"),
    ],
)
def test_what_can_not_be_loaded_says_why(package, name, words):
    with pytest.raises(ConfigError, match=words):
        load_tool(name)
