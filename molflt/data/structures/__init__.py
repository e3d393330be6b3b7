"""Reading, checking and storing atomic structures with energies.

:func:`open_dataset` opens any source; :func:`molflt.data.structures.records.make_record` says what
a structure is; :func:`molflt.data.structures.store.write_store` writes the compact store used for
training.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from molflt.data.structures.ase_files import AseStructures
from molflt.data.structures.base import AS_IT_IS, Reading, Structures
from molflt.data.structures.oc20_lmdb import Oc20Lmdb
from molflt.data.structures.store import StructureStore
from molflt.data.structures.tags import Tagged

__all__ = ["AS_IT_IS", "SOURCES", "Reading", "Structures", "open_dataset", "source_of"]

# Name in messages -> class. A path goes to the first one that takes it.
SOURCES: dict[str, type[Structures]] = {
    "compact store": StructureStore,
    "OC20 LMDB": Oc20Lmdb,
    "file that ASE reads": AseStructures,
}


def open_dataset(
    path: str | Path, skip_bad: bool = False, reading: Reading = AS_IT_IS, once: bool = False
) -> Structures:
    """Open structures for reading, whatever holds them.

    Args:
        path: a compact store (``.safetensors``), an OC20 LMDB (``.lmdb`` file, or a folder of
            ``*.lmdb`` shards), or a file ASE reads without unpickling (``.traj``, ``.extxyz``,
            ``.db``, ``.cif``, ...): whatever a class of `SOURCES` takes.
        skip_bad: read everything once, leave out structures that are not valid, and list them in
            ``.bad`` as (name, reason), instead of refusing the source at the first one.
        reading: which entry is the energy, and what tags mean, in files that ASE reads.
        once: everything will be read once, by who leaves out himself what raises then; see
            :meth:`Structures.to_read_once`.

    Raises:
        FileNotFoundError: if there is nothing at ``path``.
        ValueError: if what is there is damaged or of an unknown kind, or cannot be read in another
            way than it is.
    """
    if reading.tags == "guess":
        plain = reading._replace(tags="any", surface=None)
        return Tagged(open_dataset(path, skip_bad, plain), reading.surface)
    source = source_of(Path(path))
    if "tags" not in source.options:  # what demands nothing
        tags = AS_IT_IS.tags if reading.tags == "any" else reading.tags
        reading = reading._replace(tags=tags, for_prediction=False, keep_atoms=False)
    given = reading._replace(surface=None)._asdict().items()
    options = {name: value for name, value in given if value != AS_IT_IS._asdict()[name]}
    for name, value in options.items():
        if name not in source.options:
            kind = next(kind for kind, known in SOURCES.items() if known is source)
            raise ValueError(
                f"{path}: {name}={value} is for files that ASE reads; got a {kind}, which needs no "
                f"{name}; leave it out"
            )
    if once and not options:
        return source.to_read_once(Path(path), skip_bad)
    make: Callable[..., Structures] = source
    return make(path, skip_bad=skip_bad, **options)


def source_of(path: Path) -> type[Structures]:
    """The class that opens a path.

    Raises:
        FileNotFoundError: if there is nothing at ``path``.
        ValueError: if no class takes it.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder; expected a {', '.join(SOURCES)}")
    for source in SOURCES.values():
        if source.takes(path):
            return source
    known = "; ".join(f"{name} ({', '.join(s.suffixes)})" for name, s in SOURCES.items())
    raise ValueError(
        f"{path}: unknown ending {path.suffix!r}; expected one of {known}; formats that can carry "
        "code, such as .pkl and .py, are refused"
    )
