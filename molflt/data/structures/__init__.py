"""Reading, checking and storing atomic structures with energies.

:func:`open_dataset` opens any source, :func:`molflt.data.structures.records.make_record` checks a
structure, and :func:`molflt.data.structures.store.write_store` writes the compact store used for
training.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from molflt.data.structures.base import AS_IT_IS, Reading, Structures
from molflt.data.structures.parts import Joined
from molflt.data.structures.sources import SOURCES, Paths, files_of, named, source_of
from molflt.data.structures.tags import Tagged

__all__ = ["AS_IT_IS", "SOURCES", "Reading", "Structures", "open_dataset", "source_of"]


def open_dataset(
    path: Paths,
    skip_bad: bool = False,
    reading: Reading = AS_IT_IS,
    once: bool = False,
    trained: Reading = AS_IT_IS,
) -> Structures:
    """Opens a source of structures for reading.

    Args:
        path: a compact store (``.safetensors``), an OC20 LMDB (``.lmdb`` file, or a folder of
            ``*.lmdb`` shards), or a file that ASE reads without running code (``.traj``,
            ``.extxyz``, ``.db``, ``.cif``, POSCAR, OUTCAR, ...); or a folder of such files, a
            pattern of names such as ``runs/*/OUTCAR``, or a list of these, which are joined.
        skip_bad: read everything once, leave out invalid structures, and list them in ``.bad`` as
            (name, reason), instead of refusing the source at the first one.
        reading: meaning of the entries of files that ASE reads.
        once: True for callers that read everything once and leave out records that raise an error;
            see :meth:`Structures.to_read_once`.
        trained: the same in training; options equal to these are ignored if a source lacks them.
    """
    if reading.tags == "guess":
        plain = reading._replace(tags="any", surface=None)
        return Tagged(open_dataset(path, skip_bad, plain, trained=trained), reading.surface)
    whole, files = named(path), files_of(path)
    parts: list[Structures] = []
    for source, group in groupby(files, source_of):
        own = list(group)
        if source.joins_files:
            name = whole if own == files else named(own)
            parts.append(_opened(source, name, own, skip_bad, reading, once, trained))
        else:
            parts += [_opened(source, file, [], skip_bad, reading, once, trained) for file in own]
    return parts[0] if len(parts) == 1 else Joined(whole, parts)


def _opened(
    source: type[Structures],
    path: Path,
    files: list[Path],
    skip_bad: bool,
    reading: Reading,
    once: bool,
    trained: Reading,
) -> Structures:
    if "tags" not in source.options:  # ignore options that demand nothing
        tags = AS_IT_IS.tags if reading.tags == "any" else reading.tags
        reading = reading._replace(tags=tags, for_prediction=False, keep_atoms=False)
    given = reading._replace(surface=None)._asdict().items()
    options = {name: value for name, value in given if value != getattr(AS_IT_IS, name)}
    for name, value in list(options.items()):
        if name not in source.options and value == getattr(trained, name):
            del options[name]
        elif name not in source.options:
            kind = next(kind for kind, known in SOURCES.items() if known is source)
            raise ValueError(
                f"{path}: {name}={value} is for files that ASE reads; got a {kind}, which needs no "
                f"{name}; leave it out"
            )
    if once and not options and not files:
        return source.to_read_once(path, skip_bad)
    make: Callable[..., Structures] = source
    return make(path, skip_bad=skip_bad, **options, **({"files": files} if files else {}))
