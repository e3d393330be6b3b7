"""Agreement of guessed tags (`--tags guess`) with the tags of data sets.

    python scripts/tags.py ../shared/data

Each set is compared with and without its constraints, and with and without the range of the share
of a slab that is surface in the set, which a trained model knows.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
from kit.rows import markdown
from kit.words import described
from torch_geometric.data import Data

from molflt.atoms import Tag
from molflt.data.structures import open_dataset
from molflt.data.structures.records import make_record
from molflt.data.structures.tags import guess_tags

SAMPLE = Path(__file__).resolve().parents[1] / "datasets" / "chgnet-sample"


def game_net(path: Path) -> Iterator[Data]:
    """Systems of gamenet_fg.npz, whose tag 0 are the fixed atoms."""
    held = dict(np.load(path))
    ends = held["natoms"].cumsum()
    for i, (start, end) in enumerate(zip(ends - held["natoms"], ends, strict=True)):
        own = {name: held[name][start:end] for name in ("pos", "atomic_numbers", "tags")}
        yield make_record(cell=held["cell"][i], fixed=own["tags"] == Tag.SUBSURFACE, **own)


def agreement(records: list[Data], free: bool, known: bool) -> list[float]:
    """Compares guesses with tags.

    Args:
        records: with tags.
        free: guess without constraints.
        known: guess with the range of the shares of surface atoms.

    Returns:
        Percent of atoms, of systems, and of systems whose adsorbate agrees.
    """
    given = [record.tags.numpy() for record in records]
    shares = [float((one[one != Tag.ADSORBATE] == Tag.SURFACE).mean()) for one in given]
    guesses = []
    for record in records:
        one = record.clone()
        one.fixed &= not free
        guesses.append(guess_tags(one, (min(shares), max(shares)) if known else None).tags)
    pairs = list(zip(given, guesses, strict=True))
    atoms = np.concatenate(given) == np.concatenate(guesses)
    systems = [(one == two).all() for one, two in pairs]
    adsorbates = [((one == Tag.ADSORBATE) == (two == Tag.ADSORBATE)).all() for one, two in pairs]
    return [100 * float(np.mean(one)) for one in (atoms, systems, adsorbates)]


def main(words: list[str] | None = None) -> None:
    """Prints the table."""
    parser = described(__doc__)
    parser.add_argument("data", type=Path, help="folder with oc20/ and gamenet_fg/")
    given = parser.parse_args(words)
    sample = sorted(SAMPLE.glob("*.safetensors"))
    sets = {
        "OC20, IS2RE": open_dataset(given.data / "oc20" / "oc20_is2re_val20.lmdb"),
        "GAME-Net's FG set": game_net(given.data / "gamenet_fg" / "gamenet_fg.npz"),
        "CHGNet sample": (record for file in sample for record in open_dataset(file)),
    }
    rows = []
    for name, source in sets.items():
        records = list(source)
        for free, known in product((False, True), repeat=2):
            percent = [f"{one:.2f}" for one in agreement(records, free, known)]
            told = ["no" if free else "yes", "yes" if known else "no"]
            rows.append([name, f"{len(records):,}", *told, *percent])
    head = ["set", "systems", "constraints", "share", "atoms, %", "systems, %", "adsorbates, %"]
    print(markdown(head, rows))


if __name__ == "__main__":
    main()
