"""Optional packages."""

import importlib
from typing import Any


def require(module: str, use: str, extra: str) -> Any:
    """Imports a module of an optional package; the error message contains `use` and `extra`."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0].replace("sklearn", "scikit-learn")
        raise ModuleNotFoundError(
            f"{use} needs the package {package}, which is not installed; run: pip install "
            f"molflt[{extra}]"
        ) from None
