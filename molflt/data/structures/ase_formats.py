"""Formats of ASE, by file name or content, whose readers run no code from the file."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any

__all__ = ["DATABASES", "ENDINGS", "ase_format", "opened", "without_packing"]

DATABASES = {".db": "db", ".json": "json", ".aselmdb": "aselmdb"}
_OPENERS: dict[str, Callable[..., IO[Any]]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
# Extension -> ASE's name of the format
ENDINGS = {
    **{".traj": "traj", ".extxyz": "extxyz", ".xyz": "extxyz", ".cif": "cif", ".vasp": "vasp"},
    **{".poscar": "vasp", ".xsf": "xsf", ".axsf": "xsf", ".pdb": "proteindatabank", ".gen": "gen"},
    **{".cube": "cube", ".res": "res", ".shelx": "res", ".pwi": "espresso-in"},
    **{".pwo": "espresso-out", ".castep": "castep-castep", ".geom": "castep-geom"},
    **{".com": "gaussian-in", ".gjf": "gaussian-in", ".nwi": "nwchem-in", ".nwo": "nwchem-out"},
    **{".xv": "siesta-xv", ".struct": "struct", ".mol": "mol", ".sdf": "sdf", ".xsd": "xsd"},
    **{".con": "eon", ".magres": "magres", **DATABASES},
}
_NAMES = {  # of files without a known extension, in lower case
    **{f"*{name}*": "vasp" for name in ("poscar", "contcar", "centcar")},
    **{"*outcar*": "vasp-out", "*xdatcar*": "vasp-xdatcar", "*vasp*.xml": "vasp-xml"},
    **{"geometry.in*": "aims", "coord": "turbomole", "gradient": "turbomole-gradient"},
}
_BEGINNINGS = {  # recognized by ASE's own marks; VASP's files by those below
    *("abinit-out", "aims-output", "espresso-in", "espresso-out", "gaussian-out", "gpaw-out"),
    *("nwchem-out", "onetep-out", "orca-output", "turbomole", "turbomole-gradient"),
}
_OF_VASP = {rb"\s*vasp\.\d": "vasp-out", rb"\s*(<\?xml[^>]*>\s*)?<modeling>": "vasp-xml"}
_PEEK = 50_000  # bytes


def without_packing(path: Path) -> Path:
    """Returns the path without .gz, .bz2 or .xz."""
    return path.with_suffix("") if path.suffix.lower() in _OPENERS else path


def opened(path: Path, mode: str) -> IO[Any]:
    """Opens a file, which is decompressed while it is read."""
    options = {} if mode == "rb" else {"encoding": "utf-8", "errors": "surrogateescape"}
    return _OPENERS.get(path.suffix.lower(), open)(path, mode, **options)


def ase_format(path: Path) -> str | None:
    """Returns ASE's name of a file's format, by file name or first bytes; None if unknown."""
    name = without_packing(path)
    found = ENDINGS.get(name.suffix.lower())
    if found is None:
        matches = (kind for mark, kind in _NAMES.items() if fnmatchcase(name.name.lower(), mark))
        found = next(matches, None)
    if found is not None or not path.is_file():
        return None if name != path and name.suffix.lower() in DATABASES else found
    from ase.io.formats import ioformats

    try:
        with opened(path, "rb") as file:
            beginning = file.read(_PEEK)
    except (OSError, EOFError, lzma.LZMAError):
        return None
    of_vasp = (kind for mark, kind in _OF_VASP.items() if re.match(mark, beginning))
    others = (kind for kind in sorted(_BEGINNINGS) if ioformats[kind].match_magic(beginning))
    return next(of_vasp, None) or next(others, None)
