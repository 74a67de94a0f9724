"""The extras of the package: the modules that each brings, and the command that installs what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from types import MappingProxyType

MODULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {  # the modules that a plain installation lacks, by extra; a test compares them with pyproject.toml
        "agent": ("cryptography", "opentelemetry", "prometheus_client", "psutil", "pynvml", "re2"),
        "conformance": ("hypothesis", "numpy", "pytest"),
        "python": ("cloudpickle",),
        "research": ("jinja2", "lightgbm", "matplotlib", "numpy", "psutil", "pyarrow", "scipy"),
        "server": (
            *(
                "aetcd",
                "cronsim",
                "cryptography",
                "grpc_reflection",
                "jinja2",
                "jwt",
                "lightgbm",
                "numpy",
                "opentelemetry",
            ),
            *("prometheus_client", "re2", "scipy", "starlette", "uvicorn"),
        ),
    }
)
PREFERRED = (
    "research",
    "server",
    "agent",
    "python",
    "conformance",
)  # for a module that several bring, as a user without a mesh would choose


def bringing(module: str, preferred: Iterable[str] = ()) -> str:
    """Return the extra that brings a module; "" if the module is not of an extra.

    >>> bringing("numpy.linalg"), bringing("numpy", ["server"]), bringing("re2", ["agent"]), bringing("torch")
    ('research', 'server', 'agent', '')
    """
    top = module.partition(".")[0]
    return next((extra for extra in (*preferred, *PREFERRED) if top in MODULES[extra]), "")


def missing(extras: Iterable[str]) -> tuple[str, ...]:
    """Return the modules of these extras that are not installed."""
    wanted = dict.fromkeys(module for extra in extras for module in MODULES[extra])
    return tuple(module for module in wanted if find_spec(module) is None)


def how_to_install(*extras: str) -> str:
    """Return the command that installs extras.

    >>> how_to_install("server", "agent")
    "pip install 'cotenant[agent,server]'"
    """
    return f"pip install 'cotenant[{','.join(sorted(extras))}]'"
