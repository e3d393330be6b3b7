"""Taking the wanted splits out of the OC20 IS2RE archive, and nothing else."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath
from typing import IO, cast

from tqdm import tqdm

from molflt.data.packed import Unpacked
from molflt.data.structures.splits import OC20_ARCHIVE, OC20_FILES
from molflt.files import readable_size

_FILE = "data.lmdb"
_AGAIN = "delete it and download again"
_RATIO = 12  # of OC20's unpacked files to the archive
_LEAST = 2**24  # bytes: small archives may shrink more


def _target(directory: Path, name: str) -> Path:
    """Returns the path to which a key of `OC20_FILES` is unpacked."""
    return directory / "is2re" / name / _FILE


def _unpacked_size(wanted: list[str], archive: int, official: bool) -> int:
    """Bytes that the wanted splits take, at most, of an archive of so many bytes.

    Another archive than the official one does not say before; OC20's ratio is expected of it.
    """
    if official:
        return int(sum(OC20_FILES[name].gigabytes for name in wanted) * 1e9)
    return max(_RATIO * archive, _LEAST)


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _unpack(archive: Path, directory: Path, wanted: list[str], verify: bool = True) -> None:
    """Unpack the wanted keys of `OC20_FILES` to ``directory/is2re/KEY/data.lmdb``, in one pass.

    Args:
        archive: tar.gz.
        directory: where to.
        wanted: keys.
        verify: compare checksums of the unpacked files; otherwise only bound their size.
    """
    staging = directory / ".is2re.part"  # files appear in is2re complete or not at all
    if staging.is_symlink():
        raise ValueError(f"{staging}: is a symbolic link; expected a folder of its own; remove it")
    try:
        with (
            open(archive, "rb") as raw,
            tqdm.wrapattr(
                raw, "read", total=archive.stat().st_size, desc="unpack", disable=None
            ) as watched,
        ):
            content = Unpacked(archive, "gzip", watched, _AGAIN)
            with tarfile.open(fileobj=cast(IO[bytes], content), mode="r|") as tar:
                _extract(archive, tar, staging, wanted, verify)
            while content.read(2**20):  # behind the end of the tar is the sum of all
                pass
        for name in wanted if verify else ():
            _verify(archive, staging / name / _FILE, name)
        for name in wanted:
            target = _target(directory, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / name / _FILE, target)
    except tarfile.TarError as error:
        raise ValueError(f"{archive}: not a complete tar.gz; {error}; {_AGAIN}") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _extract(
    archive: Path, tar: tarfile.TarFile, staging: Path, wanted: list[str], verify: bool
) -> None:
    """Writes the wanted splits below `staging`."""
    most = _unpacked_size(wanted, archive.stat().st_size, verify)
    missing, left = set(wanted), most
    while (member := tar.next()) is not None:
        tar.members = []  # type: ignore[attr-defined]  # else it keeps all that it has seen
        name = _wanted_split(member, wanted)
        if name is None:
            continue
        if name not in missing:
            raise ValueError(f"{archive}: {member.name} is there twice; expected it once; {_AGAIN}")
        left -= member.size
        if left < 0 and not verify:
            raise ValueError(
                f"{archive}: expected at most {readable_size(most)} in {', '.join(wanted)}; got "
                f"more, with {member.name} of {readable_size(member.size)}; if you trust the "
                "archive, unpack it with tar"
            )
        content = tar.extractfile(member)
        assert content is not None  # it is a file
        file = staging / name / _FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        with content, open(file, "wb") as out:
            shutil.copyfileobj(content, out, 2**20)
        missing.discard(name)
    for name in wanted:
        if name in missing:
            raise ValueError(f"{archive}: holds no {OC20_ARCHIVE.inner}/{name}/{_FILE}")


def _wanted_split(member: tarfile.TarInfo, wanted: list[str]) -> str | None:
    """The split that a member of the archive is the LMDB of; None for all others."""
    path, inner = PurePosixPath(member.name), PurePosixPath(OC20_ARCHIVE.inner)
    if not member.isfile() or path.name != _FILE or not path.is_relative_to(inner):
        return None
    name = str(path.relative_to(inner).parent)
    return name if name in wanted else None


def _verify(archive: Path, file: Path, name: str) -> None:
    if (found := _md5(file)) != OC20_FILES[name].md5:
        raise ValueError(
            f"{archive}: {name}/{_FILE}: expected md5 {OC20_FILES[name].md5}; got {found}; delete "
            "the archive and download again"
        )
