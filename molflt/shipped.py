"""Configurations and samples that come with the package.

In a repository or an editable install, they are in the folders ``configs`` and ``datasets``. A
wheel contains copies of these folders inside the package.
"""

from importlib.resources import files
from pathlib import Path

from molflt.files import did_you_mean


def shipped(folder: str) -> Path:
    """Returns the folder ``configs`` or ``datasets`` of this package."""
    package = Path(str(files("molflt")))
    repository = package.parent
    if (repository / "pyproject.toml").is_file() and (repository / folder).is_dir():
        return repository / folder
    return package / "shipped" / folder


def config_names() -> list[str]:
    """Returns the names of the shipped configurations: ``demo``, ``atoms/flt``, ..."""
    root = shipped("configs")
    found = (path.relative_to(root).with_suffix("") for path in root.rglob("*.yaml"))
    return sorted(path.as_posix() for path in found)


def find_config(name: str | Path) -> Path:
    """Returns the path of a configuration, given as a path or as the name of a shipped file."""
    path = Path(name)
    if path.is_file():
        return path
    names = config_names()
    short = str(name).removeprefix("configs/").removesuffix(".yaml")
    if str(name) in (short, f"{short}.yaml") and short in names:
        return shipped("configs") / f"{short}.yaml"
    listed = ", ".join(sorted({known.partition("/")[0] for known in names}))
    raise ValueError(
        f"{name}: no such file; expected a YAML configuration or the name of a shipped one"
        f"{did_you_mean(short, names)}; these begin with {listed}"
    )
