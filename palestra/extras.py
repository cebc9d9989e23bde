"""Which extra of the installation contains a module, for error messages."""

from __future__ import annotations

_EXTRAS = {
    "browser": ("playwright",),
    "cluster": ("ray",),
    "pictures": ("PIL",),
    "postgres": ("psycopg",),
    "train": (
        "accelerate",
        "fastapi",
        "gguf",
        "jinja2",
        "llguidance",
        "matplotlib",
        "numpy",
        "openai",
        "prometheus_client",
        "renderers",
        "safetensors",
        "sqlalchemy",
        "starlette",
        "torch",
        "transformers",
        "uvicorn",
        "uvloop",
    ),
}


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """Describe what to install for a missing module of an extra; None for other modules."""
    module = (error.name or "").partition(".")[0]
    for extra, modules in _EXTRAS.items():
        if module in modules:
            return (
                f"this needs {module}, which the client alone does not bring; install palestra[{extra}] "
                f"(in a checkout: pip install '.[{extra}]')"
            )
    return None
