"""Checks of text files for content that ASE ignores or misreads, and charges that it omits."""

import re
from itertools import islice
from pathlib import Path
from typing import IO

from molflt.files import shown, warn

_NOTHING = "(?!)"  # pattern that never matches
# Total charge and multiplicity in files of these formats, which ASE does not read
_NUMBER = r"(?P<charge>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[de][-+]?\d+)?)(?![\w.])"
_NWCHEM_CHARGE = rf"^[ \t]*charge[ \t:=]+{_NUMBER}(?:\s+spin multiplicity: *(?P<multiplicity>\d+))?"
_CHARGES = {
    "gaussian-in": rf"\n[ \t]*\n[ \t]*{_NUMBER}[ \t,]+(?P<multiplicity>\d+)"
    r"(?:[ \t,]+[-+]?\d+)*[ \t]*\n[ \t]*\S",  # the title has a blank line below
    "gaussian-out": rf"^ *charge *= *{_NUMBER} +multiplicity *= *(?P<multiplicity>\d+)"
    r"( *$| in supermolecule| for .* on real)",  # not of fragments or model systems
    "nwchem-in": _NWCHEM_CHARGE,
    "nwchem-out": _NWCHEM_CHARGE,
    "orca-output": rf"^ *total charge +charge *\.+ *{_NUMBER}"
    r"\s+multiplicity +mult *\.+ *(?P<multiplicity>\d+)",
    "espresso-in": rf"^[^!\n]*\btot_charge *= *{_NUMBER}",
    "castep-castep": rf"^ *net charge of system *: *{_NUMBER}",
    "gpaw-out": rf"^ *total charge: *{_NUMBER}",
    "aims-output": rf"^ *charge *= *{_NUMBER}: *(?:charged|neutral) system",
    "turbomole": rf"^[ \t]*\$(?:chrg|eht[ \t]+charge)[ \t=]+{_NUMBER}",
}
# Units, cells, symmetry, atoms, constraints and energies that ASE ignores or misreads; examples
_IGNORED = {
    "abinit-out": r"^[ -]*acell(?!(?:[ \t]+1\.88972\S*){3} ).*",  # acell 5.0 5.0 5.0 Bohr
    "aims": r"^[ \t]*lattice_vector\b.*\n[ \t]*constrain_relaxation\b.*|"  # fixes the cell
    r"^[ \t]*(?:homogeneous_field|multipole)\b.*",  # homogeneous_field 0 0 0.1
    "castep-castep": r"^ *dispersion corrected final energy.*",  # Dispersion corrected final energy
    "cube": r"\A.*\n.*\n([ \t]*-?\d+(?:[ \t]+\S+){0,2}[ \t]+\S*[1-9].*)",  # third line: 1 -5 0 0
    "espresso-in": r"^[ \t]*(?:atomic_p|cell_p)"  # ATOMIC_POSITIONS ! crystal
    r".*[!#].*(?:crystal|bohr|angs|alat).*",
    "espresso-out": r"^!! +total energy.*",  # !!   total energy = -2 Ry, with exact exchange
    "gaussian-in": r"\bunits[ \t]*[=(][ (=]*(?:\w+[ \t]*,[ \t]*)?(?:au|bohr)\b",  # units=(rad,au)
    "gaussian-out": r"^ *(?:ONIOM: extrapolated|"  # ONIOM: extrapolated energy = -9
    r"counterpoise corrected) energy.*",
    "nwchem-in": r"^[ \t]*geometry\b.*\bunits[ \t]+(?!an)\w+|"  # geometry units bohr
    r"^[ \t]*symmetry\b(?![ \t]+c1\b).*|"  # symmetry d2h
    r"^(?![ \t]*(?-i:[A-Z][a-z]?)(?:[ \t]+\S+){3}$)"  # unlike H 0.0 0.0 0.7
    r"[ \t]*[a-z]\w*(?:[ \t]+[-+]?\d*\.\d\S*){3}.*$",  # H1 0.0 0.0 0.7
    "nwchem-out": r"^ *output coordinates in (?!angstrom).*|"  # Output coordinates in a.u.
    r"^ *total (?:DFT|SCF) energy.*(?=\n(?:(?!.*(?:energy gradients|mode=accept)| *geometry \"|"
    r" *total (?:DFT|SCF) energy).*\n)*+ *geometry \")",  # Total DFT energy = -1, then a geometry
    "proteindatabank": r"^CRYST1.{49}(?!(?:P ?1)? *\d* *$).*|"  # CRYST1 of another group than P 1
    r"(^CRYST1.*)\n(?:(?!CRYST1|END).*\n)*+END.*\n(?:(?!CRYST1|END|ATOM|HETATM).*\n)*+"
    r"(?:ATOM|HETATM)|"  # CRYST1 of the first model, if a second model lacks it
    r"^(?:ATOM  |HETATM).{10}[B-Z].*|"  # alternative location B in column 17
    r"(?:[1-9][-+]|[-+][1-9])(?<=^(?:ATOM  |HETATM).{74})",  # charge 2+ in columns 79 and 80
    "res": r"^SYMM\b.*|^LATT\b(?![ \t]+-1\b).*|"  # SYMM -x,-y,z, LATT 1 or, below, H 1 .1 .2 .3 .5
    r"^(?!TITL|CELL|ZERR)\w+[ \t]+\d+(?:[ \t]+-?\d*\.\d+){3}[ \t]+(?!1?1(?:\.0*)?(?![\d.]))\S+",
    "turbomole": r"^[ \t]*\$(?:periodic|lattice|cell|coord[ \t]+(?:angs|frac)).*",  # $coord angs
    "vasp": r"^[ \t]*(?:[-+.\de]+[ \t]+){3}(?=(?:\.?[tf]\S*(?:[ \t]+|$)){3})"  # 0.0 0.0 0.5 t t f
    r"(?:\S+[ \t]+){0,2}(?-i:f\b|\.[fF]|F(?:alse|ALSE)).*",
    "xsd": r"\b(?:ImageOf|Restrict(?:ed|s)Properties)=\"[^\"]+\"",  # <Atom3d ImageOf="3"/>
    "xsf": r"^#[ \t]*total energy\b.*",  # # total energy = -3.0 eV, of aenet with forces in eV/Å
}


def check_text(path: Path, file: IO[str], kind: str) -> dict[str, float]:
    """Returns the total charge and multiplicity in a file of format `kind`, if ASE omits them.

    Rejects files that ASE misreads, and warns about truncated files and unreliable steps of VASP.
    Afterwards, `file`, which is `path` open for reading, is at its start.
    """
    content = file.read() if kind in _CHARGES or kind in _IGNORED else ""
    if ignored := re.search(_IGNORED.get(kind, _NOTHING), content, re.M | re.I):
        part = ignored[ignored.lastindex or 0].strip()
        raise ValueError(f"ASE ignores {shown(part, 60)}; convert the file without ASE")
    if several := re.search(r"--link1--|\$new_job", content, re.I):
        raise ValueError(f"several jobs ({several[0]}), which ASE joins; split the file")
    if kind in ("proteindatabank", "res") and not re.search("^END", content, re.M | re.I):
        warn(f"{path}: no line END; the file may be truncated")
    file.seek(0)
    if kind == "vasp":
        _expect_counts_of_poscar(file)
    elif kind == "proteindatabank":
        _expect_elements_of_pdb(file)
    elif kind in ("vasp-xml", "vasp-out"):
        _warn_of_steps(path, file, kind)
    file.seek(0)
    return _charge_and_multiplicity(kind, content)


def _charge_and_multiplicity(kind: str, text: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for match in re.finditer(_CHARGES.get(kind, _NOTHING), text, re.M | re.I):
        numbers = {name: digits for name, digits in match.groupdict().items() if digits}
        for name, digits in numbers.items():
            value = float(digits.lower().replace("d", "e"))
            if values.setdefault(name, value) != value:
                raise ValueError("jobs with different charges or multiplicities; split the file")
        if kind == "gaussian-in":  # later lines may look like a charge
            break
    return values


def _expect_counts_of_poscar(file: IO[str]) -> None:
    title, *_, symbols, counts = (line.split() for line in islice(file, 7))
    if symbols[0].isdigit():  # VASP 4: elements are in line 1
        has_symbols = all(re.fullmatch("[A-Z][a-z]?", word) for word in title)
        symbols, counts = title if has_symbols else [], symbols
    if len(symbols) != len(counts):
        got = f"got {len(symbols)}; insert the elements, in the order of POTCAR, as line 6"
        raise ValueError(f"expected {len(counts)} elements in line 6 or 1; {got}")


def _expect_elements_of_pdb(file: IO[str]) -> None:
    """Rejects names of atoms that ASE may misread, such as CA for a carbon atom, as elements."""
    from ase.data import atomic_numbers

    for line in file:
        if not line.startswith(("ATOM", "HETATM")) or line[76:78].strip():
            continue
        name = line[12:16].strip()[:2]
        if re.fullmatch("[A-Z]{2}", name) and name.title() in atomic_numbers:
            raise ValueError(
                f"an atom {name} without an element in columns 77 and 78, which ASE would read as "
                f"{name.title()}; add the elements"
            )


def _warn_of_steps(path: Path, file: IO[str], kind: str) -> None:
    """Warns about a truncated vasprun.xml, and about steps that used all NELM electronic cycles."""
    complete = kind == "vasp-out"  # ASE reads whole steps of OUTCAR
    nelm = 0  # maximum number of electronic cycles
    cycles: list[int] = []  # electronic cycles of each ionic step
    for line in file:
        if "NELM" in line and (match := re.search(r"\bNELM\b\D*(\d+)", line)):
            nelm = int(match[1])
        elif "Iteration" in line and (match := re.search(r"\( *(\d+)\)", line)):  # OUTCAR
            if match[1] != "1":  # another cycle of the same ionic step
                del cycles[-1:]
            cycles.append(int(match[1]))
        elif "<calculation>" in line:
            cycles.append(0)
        elif "<scstep>" in line:
            cycles[-1] += 1
        complete |= "</modeling>" in line
    if not complete:
        warn(f"{path}: the file is truncated; its last steps are not read")
    if steps := [step for step, count in enumerate(cycles, 1) if count >= nelm > 1]:
        warn(
            f"{path}: {len(steps)} of {len(cycles)} steps, such as step {steps[0]}, used all "
            f"{nelm} electronic cycles (NELM); their energies may be wrong; remove these steps"
        )
