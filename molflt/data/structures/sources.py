"""Source kinds, file name patterns, and splits of a data set."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from functools import cache
from glob import escape, has_magic, iglob
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from molflt.data.structures.ase_files import AseStructures, ase_format
from molflt.data.structures.base import Structures
from molflt.data.structures.oc20 import Oc20Lmdb
from molflt.data.structures.splits import OC20_ARCHIVE, SPLITS_IN_ORDER
from molflt.data.structures.store import StructureStore
from molflt.files import natural, without_packing

Paths: TypeAlias = str | Path | Sequence[str | Path]

# The first class that accepts a path opens it.
SOURCES: dict[str, type[Structures]] = {
    source.kind: source for source in (StructureStore, Oc20Lmdb, AseStructures)
}
_VASP = ("poscar", "contcar", "outcar", "xdatcar", "vasprun")  # files of one calculation
_LIKE_SPLITS = re.compile("train|val|test|dev|eval|hold", re.IGNORECASE)
_LISTED = 12  # maximum number of names in a message


def source_of(path: Path) -> type[Structures]:
    """Returns the class that opens a file or a shard folder."""
    if not path.exists():
        *others, last = SOURCES
        raise FileNotFoundError(
            f"{path}: no such file or folder; expected a {', '.join(others)} or {last}; see molflt "
            "data download"
        )
    for source in SOURCES.values():
        if source.takes(path):
            return source
    known = "; ".join(f"{kind} ({', '.join(s.suffixes[:6])})" for kind, s in SOURCES.items())
    raise ValueError(
        f"{path}: unknown ending {path.suffix!r}; expected one of {known}, POSCAR, OUTCAR; convert "
        f"it with {shlex.join(['ase', 'convert', str(path), str(path.with_suffix('.extxyz'))])}, "
        "and check its elements, because ASE reads atom types 1 and 2 of LAMMPS as H and He; "
        "formats that can carry code, such as .pkl and .py, are not supported"
    )


def files_of(paths: Paths) -> list[Path]:
    """Returns the unique files and shard folders that the paths refer to.

    Args:
        paths: a file, a folder (its files and folders are read in natural order), or a pattern such
            as ``runs/*/OUTCAR`` or ``{a,b}.cif``; or several of these.
    """
    sources: list[Path] = []
    for path in [Path(paths)] if isinstance(paths, str | Path) else map(Path, paths):
        matches = [path] if path.exists() or not _is_pattern(path) else _matching(path)
        if not matches:
            raise FileNotFoundError(f"{path}: no file matches this pattern")
        for match in matches:
            files, others = _scan(match) if match.is_dir() else ([match], [])
            if not files:
                raise _no_structures(match, others)
            _print_others(match, len(files), tuple(others))
            sources += files
    return list({os.path.abspath(file): file for file in sources}.values())


def named(paths: Paths) -> Path:
    """Returns a path for messages; several paths are combined into a pattern."""
    if isinstance(paths, str | Path):
        return Path(paths)
    names = [str(path) for path in paths]
    shown = names if len(names) < 4 else [names[0], "...", names[-1]]
    return Path(names[0] if len(names) == 1 else f"{{{','.join(shown)}}}")


def exists(path: Path) -> bool:
    """Returns True if the file or folder exists, or if a file matches the pattern."""
    return path.exists() or (_is_pattern(path) and bool(_matching(path)))


def is_same(a: Path, b: Path) -> bool:
    """Returns True if both paths lead to the same file or folder, or are equal patterns."""
    return a.samefile(b) if a.exists() and b.exists() else a == b


def is_one_source(path: Path) -> bool:
    """Returns True for a file, a pattern, or a folder of structures without splits."""
    if not path.is_dir() or is_shards(path):
        return exists(path)
    try:
        return not any(map(_LIKE_SPLITS.match, sources_in(path)[0]))
    except FileNotFoundError:
        return False


def split_path(root: str | Path, split: str) -> Path:
    """Returns the path of a split of a data set.

    The search order is ``ROOT/SPLIT.safetensors``, ``ROOT/SPLIT.lmdb``, a folder ``ROOT/SPLIT`` of
    LMDB shards, files of the other classes in `SOURCES`, a folder ``ROOT/SPLIT`` of such files, and
    then the same names in the folders of the OC20 download. ``ROOT`` may be the folder of the
    download, its ``is2re`` folder, or a subset such as ``is2re/10k``. Subsets use the validation
    splits of ``is2re/all``. `split` is ``train``, ``val_id``, ... or, with a subset, ``10k/train``.
    """
    root = Path(root)
    if not root.is_dir():
        raise FileNotFoundError(
            f"{root}: no such folder or file; expected a data set with {split}.safetensors, one "
            "file of structures, or a pattern such as '{a,b}.extxyz'"
        )
    bases = [root, root / "is2re", root / OC20_ARCHIVE.inner]
    subsets = [base / name for base in bases for name in ("10k", "100k", "all")]
    in_bases = [path for folder in bases if (path := _in_folder(folder, split))]
    in_subsets = [path for folder in subsets if (path := _in_folder(folder, split))]
    if not in_bases and len(in_subsets) > 1:
        names = ", ".join(str(path.relative_to(root)) for path in in_subsets)
        raise ValueError(
            f"{root}: several {split} splits: {names}; choose one, for instance with the folder "
            f"{in_subsets[0].parent} instead of {root}"
        )
    paths = in_bases + in_subsets
    if root.name in ("10k", "100k") and (path := _in_folder(root.parent / "all", split)):
        paths.append(path)
    if not paths:
        entries = sorted(p.name for p in root.iterdir() if not p.name.startswith("."))
        raise FileNotFoundError(
            f"{root}: no split {split!r}; expected {split}.safetensors, {split}.lmdb, a folder "
            f"{split} of LMDB shards, or a file that ASE reads; found "
            + (", ".join(entries[:_LISTED]) or "an empty folder")
            + f"; for other files, use a quoted pattern, such as {shlex.quote(f'{root}/*')}"
        )
    return paths[0]


def sources_in(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Returns sources of structures, keyed by name in split order, and the names of other entries.

    JSON files count as structures only if they are named like a split.
    """
    found, others = _children(folder)
    if not found:
        raise _no_structures(folder, others)
    splits = [name for name in SPLITS_IN_ORDER if name in found]
    return {name: found[name][0] for name in dict.fromkeys([*splits, *found])}, others


def _no_structures(folder: Path, others: Sequence[str]) -> FileNotFoundError:
    return FileNotFoundError(
        f"{folder}: no structures; expected a file for each split, files that ASE reads, or "
        f"LMDB shards; found {', '.join(others[:_LISTED]) or 'an empty folder'}"
    )


def _children(folder: Path) -> tuple[dict[str, tuple[Path, list[Path]]], list[str]]:
    """Returns each source in a folder with its files, keyed by name, and names of other entries."""
    found: dict[str, tuple[Path, list[Path]]] = {}
    others = []
    for path in sorted(folder.iterdir(), key=natural):
        if path.name.startswith("."):
            continue
        files, unknown = _scan(path)
        if not files:
            others.append(path.name)
        elif (name := _name(path)) in found:
            raise ValueError(
                f"{path}: expected one file for {name}; also got {found[name][0].name}, which may "
                "contain the same structures; remove one of them, or select files with a pattern"
            )
        else:
            found[name] = (path, files)
            others += [f"{path.name}/{entry}" for entry in unknown]
    return found, others


@cache  # once per process
def _print_others(folder: Path, count: int, others: Sequence[str]) -> None:
    if others:
        more = f" and {len(others) - _LISTED} more" if len(others) > _LISTED else ""
        listed = ", ".join(others[:_LISTED]) + more
        print(f"molflt: {folder}: {count} sources; not read: {listed}", file=sys.stderr)


def _scan(path: Path) -> tuple[list[Path], list[str]]:
    """Returns the structure files and shard folders at or below a path, and the other names."""
    if not path.is_dir():
        is_settings = path.suffix.lower() == ".json" and path.stem not in SPLITS_IN_ORDER
        taken = not is_settings and any(source.takes(path) for source in SOURCES.values())
        return ([path] if taken else []), []
    if is_shards(path):
        return [path], []
    found, others = _children(path)
    parts = {part: file for file, _ in found.values() if (part := _part_of_calculation(file))}
    if len(parts) > 1:
        *_, last = parts.values()
        pattern = path.parent / "*" / last.name
        raise ValueError(
            f"{path}: {', '.join(file.name for file in parts.values())} may belong to one "
            f"calculation; select one, such as {shlex.quote(str(last))}, or, in several folders, a "
            f"pattern, such as {shlex.quote(str(pattern))}"
        )
    return [file for _, files in found.values() for file in files], others


def _part_of_calculation(path: Path) -> str | None:
    """Returns the kind of a file that VASP writes, such as "outcar", or None for other files."""
    if path.is_dir() or not (ase_format(path) or "").startswith("vasp"):
        return None
    return next((part for part in _VASP if part in path.name.lower()), None)


def is_shards(folder: Path) -> bool:
    """Returns True if a folder contains shards of one source rather than splits or other files."""
    taken = next((source for source in SOURCES.values() if source.takes(folder)), None)
    if taken is not Oc20Lmdb:
        return taken is not None
    sources = _children(folder)[0]
    only_shards = all(p.is_file() and p.suffix in taken.suffixes for p, _ in sources.values())
    return only_shards and sources.keys().isdisjoint(SPLITS_IN_ORDER)


def _name(path: Path) -> str:
    """Returns the name of a source: the file name without known extensions, or the folder name."""
    plain = without_packing(path)
    known = {suffix for source in SOURCES.values() for suffix in source.suffixes}
    return plain.stem if path.is_file() and plain.suffix.lower() in known else path.name


def _in_folder(folder: Path, split: str) -> Path | None:
    """Returns the file or folder of a split in one folder, or None."""
    base = folder / split
    paths = sorted(path for path in base.parent.glob(f"{escape(base.name)}.*") if path.is_file())
    # train.xyz precedes train.old.xyz, as False precedes True
    paths.sort(key=lambda path: without_packing(path).stem != base.name)
    if base.is_dir():
        paths.append(base)
    for source in SOURCES.values():
        if path := next(filter(source.takes, paths), None):
            return path
    return base if base.is_dir() and _scan(base)[0] else None


def _is_pattern(path: Path) -> bool:
    return has_magic(str(path)) or len(_patterns(str(path))) > 1


def _matching(path: Path) -> list[Path]:
    names = chain.from_iterable(iglob(text, recursive=True) for text in _patterns(str(path)))
    return sorted(map(Path, names), key=natural)


def _patterns(text: str) -> list[str]:
    """Expands braces, such as {a,b}.cif, to patterns without braces."""
    braces = re.search(r"\{([^{}]*,[^{}]*)\}", text)
    if braces is None:
        return [text]
    before, after = text[: braces.start()], text[braces.end() :]
    choices = (before + choice + after for choice in braces[1].split(","))
    return list(chain.from_iterable(map(_patterns, choices)))
