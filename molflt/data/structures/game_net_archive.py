"""The archive of GAME-Net's FG set: where it is, its sums, and its texts."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple, cast

from molflt.data.packed import Member, unpacked
from molflt.files import shown

__all__ = ["GAME_NET"]


class _Archive(NamedTuple):
    """The archive as published (MIT licence)."""

    base_url: str
    name: str
    size: int
    md5: str
    sha256: str
    licence: str


GAME_NET = _Archive(
    base_url="https://raw.githubusercontent.com/ChenglongWang/GAME-Net/"
    "7850f6229061d7b48af7728d2c40b28cf8bb7f9c/benchmarks/ocp/datasets",
    name="FG_dataset_lite.tar.xz",
    size=3_094_256,
    md5="e1e8f964e5634df436e9a5ecbd616fae",
    sha256="ce0a7f9b3d16bfb44d098233198225a28c15505435b4ad741e349989951b3e4e",
    licence="MIT, (c) 2022 iciq-tcc / nlopez-group",
)

_RELAXED, _INITIAL, _FAMILIES = "energies.dat", "energies_i.dat", "groups.dat"
_TABLES = (_RELAXED, _INITIAL, _FAMILIES)
_START, _END = ".poscar", ".contcar"
_MOST, _MOST_OF_ONE = 2**28, 2**20  # bytes of text; the archive has 4e7, its longest member 8e4
_AGAIN = "get it with molflt data download game-net DIR"


def _expect_archive(path: Path, sha256: str) -> None:
    """Refuses another archive than the one with this sum, before it is read.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: saying both sums.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; {_AGAIN}")
    if (found := _sha256(path)) != sha256.lower():
        raise ValueError(
            f"{path}: expected GAME-Net's archive with sha256 {sha256}; got {found}; {_AGAIN}, or "
            "give the sum of one that you trust as --sha256"
        )


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(path: Path) -> dict[str, bytes]:
    """Tables and structures of the archive by name; nothing else of it, and nothing on the disk."""
    found: dict[str, bytes] = {}
    left = _MOST
    try:
        with unpacked(path, "xz") as packed:
            stream = cast(IO[bytes], packed)
            with tarfile.open(fileobj=stream, mode="r|", tarinfo=Member) as tar:
                while (member := tar.next()) is not None:
                    tar.members = []  # type: ignore[attr-defined]  # else it keeps all it has seen
                    if not _is_wanted(member):
                        continue
                    left -= member.size
                    if member.size > _MOST_OF_ONE or left < 0:
                        raise ValueError(
                            f"{path}: {shown(member.name)}: expected at most {_MOST_OF_ONE:,} "
                            f"bytes in a file and {_MOST:,} in all; got more; {_AGAIN}"
                        )
                    name = str(PurePosixPath(member.name))
                    if name in found:
                        raise ValueError(
                            f"{path}: {shown(name)} is there twice; expected it once; {_AGAIN}"
                        )
                    file = tar.extractfile(member)
                    assert file is not None  # it is a file
                    found[name] = file.read()
            while packed.read(2**20):  # behind the end of the tar is the sum of all
                pass
    except tarfile.TarError as error:
        raise ValueError(f"{path}: not a complete tar.xz; {error}; {_AGAIN}") from None
    return found


def _is_wanted(member: tarfile.TarInfo) -> bool:
    path = PurePosixPath(member.name)
    inside = len(path.parts) == 3 and path.parts[1] == "structures"
    wanted = (inside and path.suffix in (_START, _END)) or str(path) in _TABLES
    return member.isfile() and wanted
