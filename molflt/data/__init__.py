"""Reading, checking and storing atomic structures with energies.

:func:`open_dataset` opens any source; :func:`molflt.data.records.make_record` says what a
structure is; :func:`molflt.data.store.write_store` writes the compact store used for training.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from molflt.data.ase_files import AseStructures
    from molflt.data.oc20_lmdb import Oc20Lmdb
    from molflt.data.store import StructureStore

__all__ = ["is_lmdb", "open_dataset", "relaxed_energies"]


def open_dataset(
    path: str | Path, skip_bad: bool = False
) -> StructureStore | Oc20Lmdb | AseStructures:
    """Open structures for reading, whatever holds them.

    Args:
        path: a compact store (``.safetensors``), an OC20 LMDB (``.lmdb`` file, or a folder of
            ``*.lmdb`` shards), or a file ASE reads without unpickling (``.traj``, ``.extxyz``,
            ``.db``, ``.cif``, ...).
        skip_bad: read everything once, leave out structures that are not valid, and list them in
            ``.bad`` as (name, reason), instead of refusing the source at the first one.

    Returns:
        A map-style dataset: ``len()``, ``[i] -> Data``, ``.path``, ``.natoms`` and ``.bad``. It
        can be sent to fork and spawn workers.

    Raises:
        FileNotFoundError: if there is nothing at ``path``.
        ValueError: if what is there is damaged or of an unknown kind.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no such file or folder; expected a .safetensors store, an OC20 .lmdb file "
            "or folder, or a file that ASE reads; see molflt data download and data make-emt"
        )
    if path.suffix == ".safetensors":
        from molflt.data.store import StructureStore

        return StructureStore(path, skip_bad=skip_bad)
    if is_lmdb(path):
        from molflt.data.oc20_lmdb import Oc20Lmdb

        return Oc20Lmdb(path, skip_bad=skip_bad)
    from molflt.data.ase_files import AseStructures

    return AseStructures(path, skip_bad=skip_bad)


def relaxed_energies(dataset: Any) -> NDArray[np.float64]:
    """Relaxed energies of a data set, (structures,), eV; NaN where there is none.

    A compact store has them in one piece; elsewhere every record is read.

    Args:
        dataset: as :func:`open_dataset` returns it.
    """
    import numpy as np
    from tqdm import tqdm

    if hasattr(dataset, "y_relaxed"):
        return dataset.y_relaxed
    # Silent where it is quick; a pickled LMDB of OC20's size takes minutes
    bar = tqdm(range(len(dataset)), desc="reading labels", delay=5, leave=False)
    return np.array([float(dataset[i].y_relaxed) for i in bar], dtype=np.float64)


def is_lmdb(path: Path) -> bool:
    """Whether :func:`open_dataset` takes a path for an OC20 LMDB: a folder, or by its ending."""
    return path.is_dir() or path.suffix in (".lmdb", ".mdb")
