"""Structures from files that ASE reads, limited to formats whose readers do not run code."""

import lzma
import re
import sqlite3
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from molflt.atoms import Atoms
from molflt.data.structures.ase_fields import Converter, text_sid, total_charge
from molflt.data.structures.ase_labels import Entries
from molflt.data.structures.ase_text import check_text
from molflt.data.structures.base import LoadedStructures, Reading
from molflt.data.structures.oc20 import LmdbFile
from molflt.files import opened, shown, without_packing

_DATABASES = {".db": "db", ".json": "json", ".aselmdb": "aselmdb"}
# Extension -> name of the format in ASE
ENDINGS = {
    ".traj": "traj", ".extxyz": "extxyz", ".xyz": "extxyz", ".cif": "cif", ".vasp": "vasp",
    ".poscar": "vasp", ".xsf": "xsf", ".axsf": "xsf", ".pdb": "proteindatabank", ".gen": "gen",
    ".cube": "cube", ".res": "res", ".shelx": "res", ".pwi": "espresso-in", ".pwo": "espresso-out",
    ".castep": "castep-castep", ".geom": "castep-geom", ".com": "gaussian-in",
    ".gjf": "gaussian-in", ".nwi": "nwchem-in", ".nwo": "nwchem-out", ".xv": "siesta-xv",
    ".mol": "mol", ".sdf": "sdf", ".xsd": "xsd", ".con": "eon", ".magres": "magres", **_DATABASES,
}  # fmt: skip
_NAMES = {  # patterns for names of files without a known extension, in lower case
    "*poscar*": "vasp", "*contcar*": "vasp", "*centcar*": "vasp",
    "*outcar*": "vasp-out", "*xdatcar*": "vasp-xdatcar", "*vasp*.xml": "vasp-xml",
    "geometry.in*": "aims", "coord": "turbomole", "gradient": "turbomole-gradient",
}  # fmt: skip
_BEGINNINGS = {  # formats that ASE recognizes; _VASP_BEGINNINGS recognizes VASP's files
    "abinit-out", "aims-output", "espresso-in", "espresso-out", "gaussian-out", "gpaw-out",
    "nwchem-out", "onetep-out", "orca-output", "turbomole", "turbomole-gradient",
}  # fmt: skip
_VASP_BEGINNINGS = {rb"\s*vasp\.\d": "vasp-out", rb"\s*(<\?xml[^>]*>\s*)?<modeling>": "vasp-xml"}
# Keys of XYZ files that ASE reads, and other names of cells, which it ignores
_XYZ_KEYS = {name.lower(): name for name in ("Lattice", "pbc", "Properties")} | {"periodic": "pbc"}
_CELLS = ("cell", "unit_cell", "unitcell", "box", "lattice_vectors", "cell_vectors")
# Operations of magnetic and modulated structures in CIF files, which ASE ignores
_OTHER_SYMMETRY = re.compile(r"symop[._](magn|ssg)")
_NOT_ANGSTROM = re.compile(r"(?<![/\w])(cell\(|(bohr|fractional|atomic_unit|nm)\b)", re.I)

_Loads = Iterator[tuple[int, Callable[[], Atoms]]]  # number of a structure, function to read it


class AseStructures(LoadedStructures):
    """Structures from files or databases that ASE reads, kept in memory.

    Reads positions, cell, periodic axes, ``atoms.get_tags()`` (0 subsurface, 1 surface, 2
    adsorbate; 0 if untagged) and constraints that fix atoms in all directions. Other constraints
    are ignored with a warning. ``y_relaxed`` is the entry `energy_key`, by default the first of
    ``info["y_relaxed"]``, the energy of the calculator and ``info["energy"]``. ``y_init`` is
    ``info["y_init"]``, and the relaxed positions are the array ``pos_relaxed``. The sid is
    ``info["sid"]`` or, by default, the number of the frame or row, counted over all files. A
    textual sid becomes the name of the structure. In ASE databases, all of these can be key-value
    pairs or entries of data. Energies must be in eV. For charges, see `ase_fields.total_charge`.

    For potentials, ``energy``, ``forces`` and ``stress`` are also read from the calculator or info,
    optionally with the prefix ``REF_``, as in data for MACE. With relaxed positions, the energy
    belongs to these, not to the initial positions. For VASP's OUTCAR and vasprun.xml, ASE's energy
    is "energy(sigma->0)"; ``energy_key="free_energy"`` selects the free energy.

    Args:
        path: file with an extension in `ENDINGS`, optionally compressed with gzip, bzip2 or xz.
        skip_bad: see `Structures`.
        files: files to read, if `path` is a folder or a pattern.
        options: fields of :class:`Reading`; tags with a different convention cause a warning.
    """

    kind = "file that ASE reads"
    suffixes = tuple(ENDINGS)
    options = Reading._fields
    joins_files = True

    def __init__(
        self, path: str | Path, skip_bad: bool = False, files: Sequence[Path] = (), **options: Any
    ) -> None:
        super().__init__(path, skip_bad)
        self.files = list(files) or [self.path]
        self.atoms: list[Atoms] = []  # as read; empty unless they are kept
        self._files: list[Path] = []  # file of each structure
        converter, several = Converter(Reading(**options)), len(self.files) > 1
        for file in self.files:
            for frame, (row, atoms) in enumerate(frames(file)):
                sid = len(self) + len(self.bad) if several else row
                added = self.add(f"{file}: frame {frame}", partial(converter.record, atoms, sid))
                if isinstance(atoms, ValueError) or not added:
                    continue
                if (name := text_sid(Entries.of(atoms).info)) is not None:
                    self.names[len(self) - 1] = name
                self._files.append(file)
                if converter.reading.keep_atoms:
                    self.atoms.append(atoms)
        if self._files:
            converter.labels.check(str(self.path))
        labels = converter.labels
        self._hint, self.labels, self.quantity = labels.hint, labels.fields, labels.quantity
        converter.warn(str(self.path))

    @classmethod
    def takes(cls, path: Path) -> bool:
        return not path.is_dir() and ase_format(path) is not None

    def file(self, index: int) -> Path:
        return self._files[self._stored(index)]

    def to_atoms(self, index: int) -> Atoms:
        if not self.atoms:
            return super().to_atoms(index)
        atoms = self.atoms[index].copy()
        if charge := total_charge(atoms):  # may be in `data` of a database
            atoms.info.setdefault("charge", charge)  # which .extxyz files do not store with arrays
        return atoms


def frames(path: Path) -> Iterator[tuple[int, Atoms | ValueError]]:
    """Yields, for each frame or row, its number and either its structure or a reading error."""
    kind, number = ase_format(path) or "vasp", -1
    try:
        for number, load in _loads(path, kind):
            atoms: Atoms | ValueError
            try:
                atoms = load()
            except Exception as error:  # errors differ between ASE's formats
                atoms = ValueError(f"cannot be read as {kind}: {_reason(error, path)}")
            yield number, atoms
        if number < 0:
            raise ValueError("no structures; expected at least one")
    except Exception as error:  # the rest of the file is lost
        yield number, ValueError(f"cannot be read as {kind}: {_reason(error, path)}")


def _reason(error: Exception, path: Path) -> str:
    """Describes an error of ASE in one line, without the path."""
    text = (str(error).strip().splitlines() or ["no reason given"])[0].removeprefix(f"{path}: ")
    if isinstance(error, KeyError):  # usually an unknown symbol
        name = str(error.args[0])
        advice = "; expected an element; replace it with H" if name in ("D", "T") else ""
        return f"{shown(name, 40)} is missing or unknown{advice}"
    return text[:200] if isinstance(error, ValueError) else f"{type(error).__name__}: {text[:200]}"


def _loads(path: Path, kind: str) -> _Loads:
    """Yields the number of each structure in a file of format `kind`, and a function to read it."""
    from ase.io.formats import ioformats, iread

    if not path.stat().st_size:
        raise ValueError("the file is empty; expected structures; download or copy the file again")
    if kind in _DATABASES.values():
        yield from _rows(path, kind)
        return
    ase_io = ioformats[kind]
    if path != without_packing(path) and not ase_io.acceptsfd:
        raise ValueError(f"ASE cannot read compressed {kind} files; unpack the file")
    mode: dict[str, Any] = {"mode": "rt", "encoding": "utf-8", "errors": "surrogateescape"}
    with opened(path, **({} if ase_io.isbinary else mode)) as file:
        if kind == "extxyz":
            yield from enumerate(xyz_frames(file))
        elif kind == "cif":
            from ase.io.cif import parse_cif

            blocks = (block for block in parse_cif(file) if block.has_structure())
            yield from enumerate(partial(_cif_block, block) for block in blocks)
        elif kind in ("mol", "sdf"):
            parts = re.split(r"^\$\$\$\$.*\n?", file.read(), flags=re.M)
            yield from enumerate(partial(_molecule_of_sdf, part) for part in parts if part.strip())
        else:
            # ASE interprets @ in a path as file@index
            source: Any = file if ase_io.acceptsfd else str(path)
            charge = check_text(path, file, kind)
            images = iread(source, index=":", format=kind, do_not_split_by_at_sign=True)
            if kind == "proteindatabank":  # ASE reads END after the last model as an empty frame
                images = filter(len, images)
            for number, atoms in enumerate(images):
                atoms.info |= charge
                if kind == "eon":
                    atoms.pbc = True  # in all of these files
                yield number, partial(lambda image: image, atoms)  # already read


def _rows(path: Path, kind: str) -> _Loads:
    import ase.db

    if kind == "aselmdb":
        file = LmdbFile(path)
        for number in sorted(int(key) for key in file if key.isdigit()):
            yield number, partial(_row_of_lmdb, file, number)
        return
    if kind == "db":  # ASE would create missing tables
        source = f"{path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(source, uri=True)) as tables:
            tables.execute("SELECT id FROM systems LIMIT 1")
    with ase.db.connect(str(path), type=kind, use_lock_file=False) as database:
        for row in database.select():
            yield row.id, partial(_of_row, row)


def _row_of_lmdb(file: LmdbFile, number: int) -> Atoms:
    from ase.calculators.calculator import all_properties
    from ase.db.row import AtomsRow
    from ase.io.jsonio import decode

    fields = decode(zlib.decompress(file.get(b"%d" % number) or b"").decode())
    fields |= {name: np.array(fields[name]) for name in all_properties if name in fields}
    return _of_row(AtomsRow(fields | {"id": number}))


def _of_row(row: Any) -> Atoms:
    atoms: Atoms = row.toatoms(add_additional_information=True)
    pairs = atoms.info.get("key_value_pairs", {})
    pairs |= {key: vars(row)[key] for key in pairs}  # ASE replaces `charge` by a sum over atoms
    return atoms


def ase_format(path: Path) -> str | None:
    """Infers ASE's name for a file's format from the file's name or beginning; None if unknown."""
    plain = without_packing(path)
    name = plain.name.lower()
    of_name = (kind for pattern, kind in _NAMES.items() if fnmatchcase(name, pattern))
    kind = ENDINGS.get(plain.suffix.lower()) or next(of_name, None)
    if kind in _DATABASES.values() and plain != path:
        return None  # compressed databases cannot be read
    if kind is not None or not path.is_file():
        return kind
    status = path.stat()
    return _format_of_content(path, status.st_mtime_ns, status.st_size)


@lru_cache(10_000)
def _format_of_content(path: Path, changed: int, size: int) -> str | None:
    """Infers the format from the beginning of a file; commands look at folders several times."""
    from ase.io.formats import ioformats

    try:
        with opened(path) as file:
            beginning = file.read(50_000)
    except (OSError, EOFError, lzma.LZMAError, zlib.error):
        return None
    of_vasp = (kind for pattern, kind in _VASP_BEGINNINGS.items() if re.match(pattern, beginning))
    others = (kind for kind in sorted(_BEGINNINGS) if ioformats[kind].match_magic(beginning))
    return next(of_vasp, None) or next(others, None)


def xyz_frames(file: IO[str]) -> Iterator[Callable[[], Atoms]]:
    """Yields, for each frame of a plain or extended XYZ file, a function that parses it."""
    for line in file:
        if line.isspace():  # between frames
            continue
        if not line.strip().isdigit():
            raise ValueError(f"expected a number of atoms; got {shown(line.strip(), 40)}")
        count = int(line)
        lines = [line, *islice(file, count + 1)]
        if len(lines) < count + 2:
            raise ValueError(f"{max(0, len(lines) - 2)} of {count} atoms; the file is truncated")
        yield partial(_xyz_frame, lines)


def _xyz_frame(lines: list[str]) -> Atoms:
    from ase.io.extxyz import read_xyz

    columns = _columns(lines[1])
    width = sum(map(int, columns.split(":")[2::3]))
    for atom, row in enumerate(lines[2:] if columns else ()):
        if (got := len(row.split())) != width:
            raise ValueError(f"atom {atom} has {got} columns; expected {width}, as in Properties")
    if re.search(r"\b(Z|numbers):I:1", lines[1]):
        # ASE ignores symbols if there are numbers; under another name, they become an array.
        lines[1] = re.sub(r"\b(species|symbols):S:1", "named:S:1", lines[1])
    (atoms,) = read_xyz(StringIO("".join(lines)), slice(None))
    symbols = np.array(atoms.get_chemical_symbols(), dtype=object)
    others = dict.fromkeys(("named", "element", "symbol"), symbols)
    others |= dict.fromkeys(("atomic_number", "atomic_numbers"), atoms.numbers)
    for name, elements in others.items():
        column = atoms.arrays.get(name, elements)
        if column.dtype == elements.dtype and len(wrong := np.flatnonzero(column != elements)):
            found = f"atom {wrong[0]} has two elements, one of them {symbols[wrong[0]]}"
            raise ValueError(f"{found}; remove one")
    atoms.arrays.pop("named", None)
    return atoms


def _columns(comment: str) -> str:
    """Returns the columns that a comment line declares; rejects entries that ASE would ignore."""
    from ase.io.extxyz import key_val_str_to_dict

    if unit := _NOT_ANGSTROM.search(comment):
        raise ValueError(
            f"the comment line contains {shown(unit[0])}; expected Cartesian coordinates in Å and "
            "Lattice=...; convert the coordinates, or remove the word"
        )
    keys = key_val_str_to_dict(comment.strip()) if comment.strip() else {}
    axes, columns = np.asarray(keys.get("pbc", True)), str(keys.get("Properties", ""))
    if axes.dtype.kind not in "bi":
        raise ValueError(f'pbc is {shown(axes.tolist())}; expected booleans, as in pbc="T T F"')
    if columns and not re.search(r"(^|:)pos:R:3(:|$)", columns):
        raise ValueError(f"expected a column pos:R:3; got Properties={shown(columns)}")
    for key, value in keys.items():
        is_cell = key.lower() in _CELLS and np.size(value) in (3, 6, 9)
        read = "Lattice" if is_cell else _XYZ_KEYS.get(key.lower(), key)
        if key != read and read not in keys and f"{key}=" in comment.replace(" ", ""):
            raise ValueError(f"ASE ignores the key {key!r}; expected {read}=...; rename it")
    return columns


def _cif_block(block: Any) -> Atoms:
    from ase.data import atomic_numbers

    if ignored := next(filter(_OTHER_SYMMETRY.search, block), None):
        raise ValueError(f"ASE ignores {ignored}; expected a structure with a space group")
    names = block.get("_atom_site_type_symbol") or block.get("_atom_site_label") or []
    for site, name in enumerate(names):
        letters = re.split("[^A-Za-z]", str(name))[0]
        if letters.isupper() and len(letters) == 2 and letters.title() in atomic_numbers:
            raise ValueError(
                f"site {site} is {shown(name, 20)}, which ASE reads as {letters[0]}; expected "
                f"_atom_site_type_symbol {letters.title()} or {letters[0]}; change it"
            )
    coordinates = [block.get(f"_atom_site_fract_{axis}") or [] for axis in "xyz"]
    for site, (*pos, name) in enumerate(zip(*coordinates, names, strict=False)):
        if any(isinstance(x, str) for x in pos):
            raise ValueError(
                f"site {site} ({shown(name, 20)}) has no coordinates; add them, or remove the site"
            )
    with warnings.catch_warnings(record=True, action="always") as caught:
        atoms: Atoms = block.get_atoms()
    if coordinates[0] and not atoms.cell.any():
        raise ValueError("expected three lengths and three angles (_cell_...); add the others")
    formula = re.findall("[A-Z][a-z]?", str(block.get("_chemical_formula_sum", "")))
    if absent := {*formula} & {*atomic_numbers} - {*atoms.symbols}:
        listed = ", ".join(sorted(absent))
        raise ValueError(f"expected sites of {listed} as in _chemical_formula_sum; add the atoms")
    for warning in caught:
        text = str(warning.message)
        if match := re.fullmatch(r"scaled_positions (\d+) and (\d+) are equivalent", text):
            sites = [int(match[2]), int(match[1])]  # ASE keeps one of them
            elements = [(re.findall("[A-Z][a-z]?", str(names[i])) or [names[i]])[0] for i in sites]
            if elements[0] != elements[1]:
                raise ValueError(
                    f"site {sites[0]}: {' and '.join(elements)} have the same position; expected "
                    "one element on each site; use an ordered structure"
                )
        warnings.warn(warning.message, stacklevel=2)
    return atoms


def _molecule_of_sdf(block: str) -> Atoms:
    from ase.io.sdf import read_sdf

    if block.split("\n", 2)[1][20:22] == "2D":
        raise ValueError("line 2 says 2D, a drawing; expected three-dimensional coordinates")
    atoms: Atoms = read_sdf(StringIO(block))
    block, end, _ = block.partition("\nM  END")
    if not end:
        raise ValueError("no line 'M  END'; the file is truncated")
    codes = [int(row[36:39].strip() or 0) for row in block.splitlines()[4 : 4 + len(atoms)]]
    charges = [4 - code for code in codes if code % 4]  # codes 0 and 4 mean neutral atoms
    radicals = [2 for code in codes if code == 4]  # multiplicity of each
    if properties := re.findall(r"^M  (CHG|RAD) +\d+(.*)", block, re.M):  # they replace the codes
        charges, radicals = (
            [int(x) for name, row in properties if name == kind for x in row.split()[1::2]]
            for kind in ("CHG", "RAD")
        )
    atoms.info["charge"] = sum(charges)
    if radicals:
        atoms.info["multiplicity"] = 1 + sum(radicals) - len(radicals)
    return atoms
