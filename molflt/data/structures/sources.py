"""From a path to structures: source kinds, file name patterns, splits and data sets."""

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from glob import escape, has_magic, iglob
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias, cast

import numpy as np

from molflt.data.structures.ase_files import AseStructures, ase_format
from molflt.data.structures.base import AS_IT_IS, Part, Reading, Structures, quantity_of, readable
from molflt.data.structures.oc20 import Oc20Lmdb
from molflt.data.structures.store import StructureStore
from molflt.data.structures.tags import Tagged
from molflt.files import natural, without_packing

Paths: TypeAlias = str | Path | Sequence[str | Path]

# The first class that accepts a path opens it.
SOURCES: dict[str, type[Structures]] = {
    source.kind: source for source in (StructureStore, Oc20Lmdb, AseStructures)
}
_VASP = ("poscar", "contcar", "outcar", "xdatcar", "vasprun")  # files of one calculation
_LIKE_SPLITS = re.compile("train|val|test|dev|eval|hold", re.IGNORECASE)
_LISTED = 12  # maximum number of names in a message

VAL_SPLITS = ("val_id", "val_ood_ads", "val_ood_cat", "val_ood_both")
TEST_SPLITS = ("test_id", "test_ood_ads", "test_ood_cat", "test_ood_both")
SPLITS_IN_ORDER = ("train", *VAL_SPLITS, *TEST_SPLITS)


class _Oc20File(NamedTuple):
    records: int
    gigabytes: float


class _Archive(NamedTuple):
    """Published archive; `inner` is the path of the splits inside it."""

    base_url: str
    name: str
    md5: str
    inner: str = ""


OC20_ARCHIVE = _Archive(  # contains all IS2RE and IS2RS splits (CC-BY-4.0)
    base_url="https://dl.fbaipublicfiles.com/opencatalystproject/data",
    name="is2res_train_val_test_lmdbs.tar.gz",
    md5="cfc04dd2f87b4102ab2f607240d25fb1",
    inner="is2res_train_val_test_lmdbs/data/is2re",
)

# Sizes of the validation and test files are upper bounds.
OC20_FILES = {
    "10k/train": _Oc20File(10_000, 1.35),
    "100k/train": _Oc20File(100_000, 13.5),
    "all/train": _Oc20File(460_328, 62.0),
    "all/val_id": _Oc20File(24_943, 3.8),
    "all/val_ood_ads": _Oc20File(24_961, 3.8),
    "all/val_ood_cat": _Oc20File(24_963, 3.8),
    "all/val_ood_both": _Oc20File(24_987, 3.8),
    "all/test_id": _Oc20File(24_948, 3.6),
    "all/test_ood_ads": _Oc20File(24_930, 3.6),
    "all/test_ood_cat": _Oc20File(24_965, 3.6),
    "all/test_ood_both": _Oc20File(24_985, 3.6),
}


def open_dataset(
    path: Paths,
    skip_bad: bool = False,
    reading: Reading = AS_IT_IS,
    once: bool = False,
    trained: Reading = AS_IT_IS,
) -> Structures:
    """Opens a source of structures for reading.

    Args:
        path: compact store (``.safetensors``), OC20 LMDB (``.lmdb`` file, or folder of ``*.lmdb``
            shards), file that ASE reads without running code (``.traj``, ``.extxyz``, ``.db``,
            ``.cif``, POSCAR, OUTCAR, ...), folder of such files, or pattern such as
            ``runs/*/OUTCAR``; or a list of these, which are joined.
        skip_bad: read everything once, skip invalid structures, and list them in ``.bad`` as
            (name, reason), instead of raising an error at the first invalid structure.
        reading: interpretation of the entries in files that ASE reads.
        once: True if the caller makes a single pass and skips records that raise an error.
        trained: `reading` of the training run. A source that does not support an option
            ignores its value if the training run used the same value.
    """
    if reading.tags == "guess":
        plain = reading._replace(tags="any", surface=None)
        return Tagged(open_dataset(path, skip_bad, plain, trained=trained), reading.surface)
    parts: list[Structures] = []
    files = files_of(path)
    for source, group in groupby(files, source_of):
        members, construct = list(group), cast("Callable[..., Structures]", source)
        joined = named(path if members == files else members)
        for file in [joined] if source.joins_files else members:
            options = _options(source, file, reading, trained)
            if source.joins_files:
                options["files"] = members
            part = construct(file, skip_bad=skip_bad, **options)
            must_check = skip_bad and not once and not part.is_checked
            parts.append(readable(part) if must_check else part)
    if not reading.for_prediction:
        quantity_of(parts)
    return parts[0] if len(parts) == 1 else Part(parts, path=named(path))


def _options(
    source: type[Structures], path: Path, reading: Reading, trained: Reading
) -> dict[str, Any]:
    """Returns the options that a source accepts; raises ValueError for options without effect."""
    fields = reading._replace(surface=None)._asdict()
    options = {name: value for name, value in fields.items() if value != getattr(AS_IT_IS, name)}
    for name in [name for name in options if name not in source.options]:
        value = options.pop(name)
        # any source satisfies tags="any", for_prediction and keep_atoms, and stores y_baseline
        satisfied = value in ("any", True) or (name, value) == ("baseline_key", "y_baseline")
        if not satisfied and value != getattr(trained, name):
            raise ValueError(
                f"{path}: {name}={value} is for files that ASE reads; got a {source.kind}, which "
                f"does not need {name}; remove it"
            )
    return options


class DataSet(NamedTuple):
    """Root and splits of a data set.

    The root is a folder with a file or a folder for each split. Alternatively, it is one file, a
    pattern, or a folder of other files, which is split at random into `train` and `val`.
    """

    root: Path
    train: str = "train"
    """split to train on"""
    val: str = "val_id"
    """split to validate on"""
    val_fraction: float | None = None
    """share of one file for `val`; None for folders, or for the default 0.1"""
    split_seed: int = 0
    """seed of the random split"""
    reading: Reading = AS_IT_IS
    """interpretation of the entries in files that ASE reads"""
    trained: Reading = AS_IT_IS
    """`reading` of the training run, which sources without such options ignore"""

    @classmethod
    def of_run(cls, data: Mapping[str, object], seed: int) -> Self:
        """Returns the data set of a run; `seed` is the split seed of runs from version 0.1."""
        reading = Reading(**{name: data[name] for name in Reading._fields if name in data})  # type: ignore[arg-type]
        return cls(
            Path(str(data["root"])),
            str(data["train_split"]),
            str(data["val_split"]),
            cast("float | None", data.get("val_fraction")),
            cast("int", data.get("split_seed", seed)),
            reading,
            reading,
        )

    @property
    def is_one(self) -> bool:
        """True if the root contains structures without splits."""
        return is_one_source(self.root) and not (self.root.is_dir() and self.has(self.train))

    def has(self, split: str) -> bool:
        """Returns True if the folder contains a split with this name."""
        try:
            return split_path(self.root, split).exists()
        except FileNotFoundError:
            return False
        except ValueError:  # several splits have this name
            return True

    def open(self, splits: Iterable[str], skip_bad: bool = False) -> dict[str, Structures]:
        """Opens splits and returns them, keyed by name."""
        if not self.is_one:
            return {split: self.opened(split_path(self.root, split), skip_bad) for split in splits}
        whole = self.opened(self.root, skip_bad)
        count = len(whole)
        order = np.random.default_rng([self.split_seed, count]).permutation(count)
        size = round(count * (self.val_fraction or 0.1))  # of the validation part
        size = min(count - 1, max(1, size))
        indices = {self.train: np.sort(order[size:]), self.val: np.sort(order[:size])}
        for split in splits:
            if split not in indices:
                raise FileNotFoundError(
                    f"{self.root}: no split {split!r}; expected {' or '.join(indices)}, the splits "
                    "of one file; use a folder with a file for each split"
                )
        return {split: Part(whole, indices[split]) for split in splits}

    def opened(self, path: Path, skip_bad: bool) -> Structures:
        """Returns all structures at a path, read in the same way."""
        return open_dataset(path, skip_bad, self.reading, trained=self.trained)


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
        is_pattern = has_magic(str(path)) or len(_patterns(str(path))) > 1
        matches = [path] if path.exists() or not is_pattern else _matching(path)
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
    return path.exists() or bool(_matching(path))


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
