"""Tell the version of Slipstream."""

import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

DISTRIBUTION = "slipstream-train"


def installed_version() -> str:
    """Return the installed version, or that of the source tree if Slipstream is used without being installed."""
    try:
        return distribution(DISTRIBUTION).version
    except PackageNotFoundError:
        pyproject = Path(__file__).resolve().parents[2] / "pyproject.toml"
        return str(tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["version"])
