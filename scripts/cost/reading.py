"""Reading speed and size of the compact store and of OC20's pickles.

The records of a published OC20 LMDB are repeated and written in both formats. Edges in the pickles
are not used, and not stored. Both files are read on one core in the same random order.
"""

import itertools
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import lmdb
import torch
from kit.rows import Rows, formatted
from kit.turns import turns

from molflt.data.structures import open_dataset
from molflt.data.structures.store import write_store

QUICK = {"systems": 30, "rounds": 1}


def repeated(source: Path, target: Path, systems: int) -> None:
    """Writes `systems` records to an LMDB by repeating the pickles of the LMDB `source`."""
    with lmdb.open(str(source), subdir=False, readonly=True, lock=False).begin() as transaction:
        records = [bytes(value) for key, value in transaction.cursor() if key.isdigit()]
    environment = lmdb.open(str(target), subdir=False, map_size=1 << 36, lock=False)
    with environment.begin(write=True) as transaction:
        for index, value in enumerate(itertools.islice(itertools.cycle(records), systems)):
            transaction.put(str(index).encode(), value)
    environment.close()


def read(dataset: torch.utils.data.Dataset, order: Sequence[int]) -> None:
    """Reads all structures in the given order."""
    for index in order:
        dataset[index]


def measure(records: Path, systems: int = 2000, rounds: int = 5) -> Rows:
    """Returns one row per format; `records` is a published OC20 LMDB."""
    with tempfile.TemporaryDirectory() as folder:
        pickled, store = Path(folder) / "pickled.lmdb", Path(folder) / "store.safetensors"
        repeated(records, pickled, systems)
        original = open_dataset(pickled)
        write_store(store, (original[i] for i in range(systems)))
        compact = open_dataset(store)
        order = torch.randperm(systems, generator=torch.Generator().manual_seed(0)).tolist()
        forms = {"OC20 LMDB, pickled": original, "compact store, mapped": compact}
        times = turns({k: partial(read, v, order) for k, v in forms.items()}, rounds)
        spent = {form: statistics.median(own) for form, own in times.items()}
        sizes = [path.stat().st_size for path in (pickled, store)]
    first, size = next(iter(spent.values())), sizes[0]
    return [
        {
            **{"form": form, "systems": systems, "systems_per_s": systems / seconds},
            **{"faster": first / seconds, "bytes": own, "smaller": size / own},
        }
        for (form, seconds), own in zip(spent.items(), sizes, strict=True)
    ]


def table(rows: Rows) -> str:
    """Formats the speed and size of each format, and the ratios to the first format."""
    speed = {"systems/s": "{systems_per_s:,.0f}", "times faster": "{faster:.1f}"}
    size = {"bytes": "{bytes:,}", "times smaller": "{smaller:.1f}"}
    return formatted(rows, {"form": "{form}", **speed, **size})
