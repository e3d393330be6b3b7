"""Fetching the OC20 IS2RE archive: checked for space, resumed, verified, unpacked in part."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Literal, NoReturn

from tqdm import tqdm

from molflt.data.structures.convert import _readable_size
from molflt.data.structures.splits import _OC20_ARCHIVE, OC20_FILES, VAL_SPLITS

__all__ = ["download"]

_CHUNK = 1 << 20
_ATTEMPTS = 5  # connections in a row that bring nothing
_TIMEOUT = 60.0  # s


def download(
    dataset: Literal["oc20-is2re"],
    directory: Path,
    splits: list[str] = ["10k/train", *VAL_SPLITS],  # noqa: B006  (shown in --help, not changed)
    base_url: str = _OC20_ARCHIVE.base_url,
    md5: str = _OC20_ARCHIVE.md5,
    keep_archive: bool = False,
) -> None:
    """Download OC20's IS2RE archive and unpack the wanted splits to DIRECTORY/is2re.

    There is one archive for all splits, 8.1 GB. An interrupted download is taken up where it
    ended; the md5 sums of the archive and of every unpacked LMDB are verified.

    Args:
        dataset: name of the data set.
        directory: folder to download and unpack into.
        splits: wanted splits: 10k/train, 100k/train, all/train, val_id, val_ood_ads, val_ood_cat,
            val_ood_both, test_id, test_ood_ads, test_ood_cat, test_ood_both.
        base_url: where the archive lies, for mirrors.
        md5: expected md5 of the archive; with another than the official one, the sums of the
            unpacked files are not known and not verified.
        keep_archive: keep the archive after unpacking.

    Raises:
        ValueError: for an unknown split, too little free disk, or a wrong md5.
        OSError: if the server cannot be reached or does not have the file.
    """
    wanted = [_official_name(split) for split in splits]
    if not wanted:
        raise ValueError("splits: expected at least one of " + ", ".join(OC20_FILES))
    missing = [name for name in wanted if not _target(directory, name).is_file()]
    if not missing:
        print(f"{directory}: already has {', '.join(wanted)}")
        return
    directory.mkdir(parents=True, exist_ok=True)
    archive = directory / _OC20_ARCHIVE.name
    url = f"{base_url.rstrip('/')}/{archive.name}"
    complete = archive.is_file()
    size = archive.stat().st_size if complete else _remote_size(url)
    official = md5 == _OC20_ARCHIVE.md5
    _check_space(directory, archive, size, missing, unpacked_known=official)
    if not complete:
        _fetch(url, archive, md5, size)
    _unpack(archive, directory, missing, verify=official)
    if not keep_archive:
        archive.unlink()
    for name in missing:
        print(
            f"{_target(directory, name)}: {_readable_size(_target(directory, name).stat().st_size)}"
        )
    print(f"next: molflt data convert {_target(directory, missing[0])} FILE.safetensors")


def _official_name(split: str) -> str:
    name = split if "/" in split else f"all/{split}"
    if name not in OC20_FILES or split == "train":
        raise ValueError(
            f"splits: expected some of {', '.join(OC20_FILES)}, validation and test also without "
            f"all/; got {split!r}"
        )
    return name


def _target(directory: Path, name: str) -> Path:
    return directory / "is2re" / name / "data.lmdb"


def _part(archive: Path) -> Path:
    return archive.with_name(f"{archive.name}.part")


def _remote_size(url: str) -> int:
    try:
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as reply:
            length = reply.headers.get("Content-Length")
    except (OSError, HTTPException) as error:
        _unreachable(url, error)
    if length is None:
        raise OSError(f"{url}: the server does not say how large the file is; use another mirror")
    return int(length)


def _unreachable(url: str, error: Exception) -> NoReturn:
    reason = getattr(error, "reason", None) or error
    raise OSError(
        f"{url}: cannot be downloaded; {reason}; run the same command again to continue"
    ) from None


def _check_space(
    directory: Path, archive: Path, size: int, wanted: list[str], unpacked_known: bool
) -> None:
    """Say what will be downloaded and refuse if the disk cannot hold it."""
    here = archive if archive.exists() else _part(archive)
    have = here.stat().st_size if here.exists() else 0
    # for another archive than the official one the unpacked size is unknown; 12 is OC20's ratio
    unpacked = (
        int(sum(OC20_FILES[name].gigabytes for name in wanted) * 1e9)
        if unpacked_known
        else 12 * size
    )
    needed = max(size - have, 0) + unpacked
    free = shutil.disk_usage(directory).free
    print(
        f"{archive.name}: {_readable_size(size)}, {_readable_size(have)} of it already here; "
        f"unpacking {', '.join(wanted)} takes {_readable_size(unpacked)}; "
        f"{_readable_size(free)} free in {directory}",
        flush=True,
    )
    if needed > free:
        raise ValueError(
            f"{directory}: not enough disk: {_readable_size(needed)} needed; "
            f"{_readable_size(free)} free; choose fewer splits or another directory"
        )


def _fetch(url: str, file: Path, md5: str, size: int) -> None:
    """Download `size` bytes, continuing what an earlier call left, and verify them.

    Raises:
        OSError: if the server stops sending; what came is kept for the next call.
        ValueError: if the complete file has another md5; it is deleted.
    """
    part = _part(file)
    if part.exists() and part.stat().st_size > size:
        part.unlink()
    idle = 0
    with tqdm(total=size, unit="B", unit_scale=True, desc=file.name, disable=None) as bar:
        while (have := part.stat().st_size if part.exists() else 0) < size:
            bar.n = have
            bar.refresh()
            error: Exception | None = None
            try:
                _receive(url, part, have, bar)
            except (OSError, HTTPException) as problem:
                if isinstance(problem, urllib.error.HTTPError) or not _is_network(problem):
                    _unreachable(url, problem)
                error = problem
            progress = part.exists() and part.stat().st_size > have
            idle = 0 if progress else idle + 1
            if idle == _ATTEMPTS:
                _unreachable(url, error or OSError("the server stopped sending"))
            if idle:
                time.sleep(0.1 * 2**idle)
        bar.n = size
    found = _md5(part)
    if found != md5 or part.stat().st_size != size:
        part.unlink()
        raise ValueError(
            f"{file}: expected md5 {md5}; got {found}; the download was damaged or is another "
            "file; it has been deleted, run the same command again"
        )
    os.replace(part, file)


def _is_network(error: Exception) -> bool:
    """Whether to try again: not when the disk is full or may not be written."""
    connection = (HTTPException, urllib.error.URLError, ConnectionError, TimeoutError)
    return isinstance(error, connection)


def _receive(url: str, part: Path, have: int, bar: tqdm) -> None:
    request = urllib.request.Request(url)
    if have:
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as reply:
        # 206 continues; a server without ranges answers 200 with the whole file
        continues = reply.status == 206
        if not continues:
            bar.n = 0
        with open(part, "ab" if continues else "wb") as out:
            while block := reply.read1(_CHUNK):
                out.write(block)
                bar.update(len(block))


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _unpack(archive: Path, directory: Path, wanted: list[str], verify: bool = True) -> None:
    """Unpack the wanted keys of `OC20_FILES` to ``directory/is2re/KEY/data.lmdb``, in one pass.

    Raises:
        ValueError: if the archive is damaged, lacks a split, or an unpacked file has a wrong md5.
    """
    target = directory / "is2re"
    staging = directory / ".is2re.part"  # files appear in is2re complete or not at all
    found: list[PurePosixPath] = []
    try:
        with (
            open(archive, "rb") as raw,
            tqdm.wrapattr(
                raw, "read", total=archive.stat().st_size, desc="unpack", disable=None
            ) as watched,
            tarfile.open(fileobj=watched, mode="r|gz") as tar,
        ):
            for member in tar:
                inside = _wanted_path(member, wanted)
                if inside is not None:
                    renamed = member.replace(name=str(inside), deep=False)
                    tar.extract(renamed, staging, filter="data")
                    found.append(inside)
        for name in wanted:
            _check_unpacked(archive, staging / name / "data.lmdb", name, verify)
        for inside in found:
            (target / inside).parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / inside, target / inside)
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(
            f"{archive}: not a complete tar.gz; {error}; delete it and download again"
        ) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _wanted_path(member: tarfile.TarInfo, wanted: list[str]) -> PurePosixPath | None:
    """Path below is2re of a file to unpack; None for other splits, folders and lock files."""
    path = PurePosixPath(member.name)
    inner = PurePosixPath(_OC20_ARCHIVE.inner)
    if not member.isfile() or not path.is_relative_to(inner) or path.name.endswith("-lock"):
        return None
    inside = path.relative_to(inner)
    return inside if str(inside.parent) in wanted else None


def _check_unpacked(archive: Path, file: Path, name: str, verify: bool) -> None:
    if not file.is_file():
        raise ValueError(f"{archive}: holds no {_OC20_ARCHIVE.inner}/{name}/data.lmdb")
    if verify and (found := _md5(file)) != OC20_FILES[name].md5:
        raise ValueError(
            f"{archive}: {name}/data.lmdb: expected md5 {OC20_FILES[name].md5}; got {found}; "
            "delete the archive and download again"
        )
