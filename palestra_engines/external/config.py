"""Common keys of the `[engine]` tables of other projects' servers: addresses, keys and folders."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from palestra.config.engine import Dtype, PooledEngineConfig

if TYPE_CHECKING:
    from palestra.config.job import JobConfig

VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"


_ADDRESS = r"https?://[^\s/?#@]+"


def _address(url: Any) -> Any:
    """Raise an error for an invalid address, or that of a route, suggesting the right one."""
    if isinstance(url, str) and "@" in url:
        raise ValueError("the address of a server has no key or password in it; engine.key_variable names a variable")
    if isinstance(url, str) and (found := re.match(f"({_ADDRESS})[/?#]", url)):
        raise ValueError(f"give the server's address alone, without a path: {found[1]}")
    if isinstance(url, str) and re.fullmatch(_ADDRESS, url) is None:
        raise ValueError(f"{url!r} is no address; give one such as http://127.0.0.1:8000")
    return url


Url = Annotated[str, BeforeValidator(_address), Field(pattern=f"^{_ADDRESS}$")]


def _one_or_several(urls: Any) -> Any:
    """Return one address or several as a tuple, because a union of pydantic's would not name the key of a mistake."""
    return (urls,) if isinstance(urls, str) else urls


def _each_once(urls: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse an address that is given twice: its server would be two workers."""
    for url in urls:
        if urls.count(url) > 1:
            raise ValueError(f"{url} is given twice")
    return urls


Urls = Annotated[
    tuple[Url, ...],
    BeforeValidator(_one_or_several),
    Field(min_length=1, max_length=64),
    AfterValidator(_each_once),
    PlainSerializer(lambda urls: urls[0] if len(urls) == 1 else list(urls), str | list[str]),
]


def _from_home(python: Path) -> Path:
    """Expand `~` in a path."""
    try:
        return python.expanduser()
    except RuntimeError as error:
        raise ValueError(f"{str(python)!r} begins with an unknown user; give the whole path") from error


def _not_empty(python: Any) -> Any:
    """Raise an error for an empty text, which would mean the current directory: a variable was unset, for example."""
    if python == "":
        raise ValueError("it is empty; give an interpreter, such as .venv-vllm/bin/python")
    return python


Interpreter = Annotated[Path, BeforeValidator(_not_empty), AfterValidator(_from_home)]


class ServerEngineConfig(PooledEngineConfig):
    """The table of an engine whose workers are another project's servers, running already or started."""

    placement_keys: ClassVar[frozenset[str]] = PooledEngineConfig.placement_keys | {
        "url",
        "key_variable",
        "weights_dir",
    }
    mixes: ClassVar[bool] = True
    in_process: ClassVar[bool] = False
    operator_keys: ClassVar[Mapping[str, str]] = {
        "key_variable": "a variable of the server's environment",
        "weights_dir": "a folder of the server",
    }

    url: Urls | None = None
    key_variable: str | None = Field(
        None,
        pattern=VARIABLE,
        description="Environment variable that holds the key of the server of `url`. The key itself is never in a "
        "configuration. None: the server needs none.",
    )
    weights_dir: Path | None = Field(
        None,
        description="Folder that the job and the server of `url` both see, for new weights. None: shared memory, of "
        "the same machine.",
    )
    dtype: Dtype = Field("bfloat16", description="Precision of the weights that are sent.")
    max_batch: Annotated[int, Field(ge=2)] = Field(
        64, description="Requests that are sent to a server at the same time."
    )

    @model_validator(mode="after")
    def _has_an_address_for_each_worker(self) -> ServerEngineConfig:
        if self.url is not None and self.replicas not in (1, len(self.url)):
            raise ValueError(
                f"replicas is {self.replicas}, and url names {len(self.url)}; give a list of as many addresses"
            )
        return self

    @property
    def urls(self) -> tuple[str, ...]:
        """Return the addresses of running workers."""
        return self.url or ()

    @property
    def precision(self) -> Dtype:
        """Return the precision of the workers' weights."""
        return self.dtype

    def check_job(self, job: JobConfig) -> None:
        """Refuse past versions of whole weights, several policies on one server, and determinism; see
        `EngineConfig`.
        """
        whose, policies, players = f"engine.kind = {self.kind!r}", job.policies, job.players
        if job.deterministic:
            raise ValueError(
                f"deterministic = true needs engine.kind = 'embedded': results of {whose} depend on its batches"
            )
        pools = [players.named[agent] for agent in players.pools]
        if whole := [name for name in pools if policies[name].adapter is None]:
            raise ValueError(
                f"roles with a pool of past versions need policies.{whole[0]}.adapter with {whose}, whose server has "
                "the whole weights of one version; or take engine.kind = 'embedded'"
            )
        if self.transfer != "file" and all(policy.adapter is not None for policy in policies.values()):
            raise ValueError(
                f"engine.weight_transfer = {self.transfer!r} is of whole weights, and adapters are sent as folders; "
                "leave it out"
            )
        if self.url is not None and len(policies) > 1:
            raise ValueError(f"a server of engine.url samples from one policy, and there are {len(policies)}")


def is_local(url: str) -> bool:
    """Return whether an address is only reachable from this machine."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")
