"""Reading, checking and storing atomic structures with energies.

:func:`open_dataset` opens any source, :func:`molflt.data.structures.records.make_record` checks a
structure, and :func:`molflt.data.structures.store.write_store` writes the compact store.
"""

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from molflt.data.structures.base import AS_IT_IS, Reading, Structures
from molflt.data.structures.parts import Part, quantity_of, readable
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
