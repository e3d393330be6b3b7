"""Reading, checking and storing atomic structures with energies.

:func:`open_dataset` opens any source, :func:`molflt.data.structures.records.make_record` checks a
structure, and :func:`molflt.data.structures.store.write_store` writes the compact store.
"""

from molflt.data.structures.base import AS_IT_IS, Reading, Structures
from molflt.data.structures.sources import SOURCES, open_dataset, source_of

__all__ = ["AS_IT_IS", "SOURCES", "Reading", "Structures", "open_dataset", "source_of"]
