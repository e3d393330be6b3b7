"""Downloads of public archives, with checks of disk space and md5; OC20 is unpacked in part."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import time
import zlib
from http.client import HTTPException, HTTPResponse
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from tqdm import tqdm

from molflt.data.structures.splits import OC20_ARCHIVE, OC20_FILES, VAL_SPLITS
from molflt.files import readable_size
from molflt.lock import FolderLock

__all__ = ["download"]


class _Archive(NamedTuple):
    """A published archive."""

    base_url: str
    name: str
    size: int
    md5: str
    licence: str


GAME_NET = _Archive(
    base_url="https://raw.githubusercontent.com/ChenglongWang/GAME-Net/"
    "7850f6229061d7b48af7728d2c40b28cf8bb7f9c/benchmarks/ocp/datasets",
    name="FG_dataset_lite.tar.xz",
    size=3_094_256,
    md5="e1e8f964e5634df436e9a5ecbd616fae",
    licence="MIT, (c) 2022 iciq-tcc / nlopez-group",
)

_CHUNK = 1 << 20
_ATTEMPTS = 5  # connections in a row without progress
_TIMEOUT = 60.0  # s
_RETRY = (408, 429)  # temporary HTTP errors, as are all from 500 on
_SPLITS = ["10k/train", *VAL_SPLITS]
_DOING = "is downloading to this folder; wait for it, or choose another folder"
_FILE = "data.lmdb"


def download(
    dataset: Literal["oc20-is2re", "game-net"],
    directory: Path,
    splits: list[str] = _SPLITS,
    base_url: str | None = None,
    md5: str | None = None,
    keep_archive: bool = False,
) -> None:
    """Download a public archive to DIRECTORY and verify it.

    oc20-is2re: one archive for all splits, 8.1 GB (CC-BY-4.0); the requested splits are unpacked to
    DIRECTORY/is2re. game-net: GAME-Net's FG set, 3.1 MB (MIT), which scripts/game_net.py of the
    repository reads. Interrupted downloads are resumed; md5 sums are verified.

    Args:
        dataset: name of the data set.
        directory: folder to download and unpack into.
        splits: splits of OC20: 10k/train, 100k/train, all/train, val_id, val_ood_ads, val_ood_cat,
            val_ood_both, test_id, test_ood_ads, test_ood_cat, test_ood_both.
        base_url: address of the archive's folder, for mirrors.
        md5: expected md5 of the archive, including one that is already there. With an archive other
            than the official one, unpacked files are not compared with their checksums.
        keep_archive: keep OC20's archive after unpacking.
    """
    alone = FolderLock(directory, _DOING, ".lock.download").held
    if dataset == "game-net":
        if keep_archive or list(splits) != _SPLITS:
            raise ValueError(
                "--splits and --keep_archive are for oc20-is2re; got game-net, whose archive is "
                "not unpacked; leave them out"
            )
        with alone():
            archive, md5 = directory / GAME_NET.name, (md5 or GAME_NET.md5).lower()
            print(f"{archive.name}: md5 {md5}; licence {GAME_NET.licence}")
            _get(archive, base_url or GAME_NET.base_url, md5, 0)
        print(f"next: python scripts/game_net.py {archive} {directory / 'fg'}")
        return
    wanted = list(dict.fromkeys(_official_name(split) for split in splits))
    if not wanted:
        raise ValueError("splits: expected at least one of " + ", ".join(OC20_FILES))
    missing = [name for name in wanted if not _target(directory, name).is_file()]
    if not missing:
        print(f"{directory}: already has {', '.join(wanted)}")
        return
    with alone():
        archive, md5 = directory / OC20_ARCHIVE.name, (md5 or OC20_ARCHIVE.md5).lower()
        unpacked = int(sum(OC20_FILES[name].gigabytes for name in missing) * 1e9)
        _get(archive, base_url or OC20_ARCHIVE.base_url, md5, unpacked)
        _unpack(archive, directory, missing, verify=md5 == OC20_ARCHIVE.md5)
        if not keep_archive:
            archive.unlink()
    for path in (_target(directory, name) for name in missing):
        print(f"{path}: {readable_size(path.stat().st_size)}")
    print(f"next: molflt data convert {_target(directory, missing[0])} FILE.safetensors")


def _target(directory: Path, name: str) -> Path:
    """Returns the path to which a key of `OC20_FILES` is unpacked."""
    return directory / "is2re" / name / _FILE


def _official_name(split: str) -> str:
    name = split if "/" in split else f"all/{split}"
    if name not in OC20_FILES or split == "train":
        raise ValueError(
            f"splits: expected some of {', '.join(OC20_FILES)}, validation and test also without "
            f"all/; got {split!r}"
        )
    return name


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _get(archive: Path, base_url: str, md5: str, unpacked: int) -> None:
    """Downloads an archive, or verifies one that is there; needs `unpacked` further bytes."""
    if not archive.is_file():
        _fetch(f"{base_url.rstrip('/')}/{archive.name}", archive, md5, unpacked)
        return
    _check_space(archive, archive, archive.stat().st_size, unpacked)
    if (found := _md5(archive)) != md5:
        raise ValueError(
            f"{archive}: expected md5 {md5}; got {found}; delete it to download it again, or give "
            "its sum as --md5"
        )


def _check_space(archive: Path, part: Path, size: int, unpacked: int) -> None:
    """Prints the size of the download; raises ValueError if the disk cannot hold it."""
    have = part.stat().st_size if part.exists() else 0
    needed = size - have + unpacked
    free = shutil.disk_usage(archive.parent).free
    print(
        f"{archive.name}: {readable_size(size)}, {readable_size(have)} of it already here; "
        f"unpacked: {readable_size(unpacked)}; {readable_size(free)} free in {archive.parent}",
        flush=True,
    )
    if needed > free:
        raise ValueError(
            f"{archive.parent}: not enough disk: {readable_size(needed)} needed; "
            f"{readable_size(free)} free; choose fewer splits or another directory"
        )


def _fetch(url: str, file: Path, md5: str, unpacked: int) -> None:
    """Downloads a file, continuing a partial one, and verifies it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part, idle, size = file.with_name(f"{file.name}.part"), 0, None
    while True:
        have = part.stat().st_size if part.exists() else 0
        problem: Exception = ConnectionError("the server stopped sending")
        try:
            with _open(url, have) as reply:
                start = have if reply.status == 206 else 0  # 200: the whole file
                total = start + int(reply.headers.get("Content-Length", 0))
                if size is None:
                    _check_space(file, part, total, unpacked)
                size = total
                _append(part, start, reply, total)
            if part.stat().st_size >= total:
                break
        except HTTPError as error:
            if error.code == 416:  # nothing is missing
                break
            if error.code < 500 and error.code not in _RETRY:
                advice = "is the address right? --base_url changes it"
                raise OSError(f"{url}: cannot be downloaded; {error}; {advice}") from None
            problem = error
        except (HTTPException, URLError, ConnectionError, TimeoutError) as error:
            problem = error
        idle = idle + 1 if have == (part.stat().st_size if part.exists() else 0) else 0
        if idle == _ATTEMPTS:
            advice = "run the same command again to continue, or choose a mirror with --base_url"
            raise OSError(f"{url}: cannot be downloaded; {problem}; {advice}")
        time.sleep(0.1 * 2**idle)
    if (found := _md5(part)) != md5:
        part.unlink()
        raise ValueError(
            f"{file}: expected md5 {md5}; got {found}; the download was damaged or is another "
            "file; it has been deleted, run the same command again"
        )
    os.replace(part, file)


def _open(url: str, start: int) -> HTTPResponse:
    headers = {"Range": f"bytes={start}-"} if start else {}
    reply: HTTPResponse = urlopen(Request(url, headers=headers), timeout=_TIMEOUT)
    return reply


def _append(part: Path, start: int, reply: HTTPResponse, total: int) -> None:
    """Writes a reply after the first `start` bytes of a file."""
    options = {"unit": "B", "unit_scale": True, "desc": part.stem, "disable": None}
    with (
        open(part, "ab" if start else "wb") as raw,
        tqdm.wrapattr(raw, "write", total=total, initial=start, **options) as out,
    ):
        shutil.copyfileobj(reply, out, _CHUNK)


def _unpack(archive: Path, directory: Path, wanted: list[str], verify: bool = True) -> None:
    """Unpacks keys of `OC20_FILES` to ``directory/is2re/KEY/data.lmdb``, in one pass."""
    staging = directory / ".is2re.part"  # files appear in is2re complete or not at all
    missing, inner = set(wanted), PurePosixPath(OC20_ARCHIVE.inner)
    again = "delete it and download again"
    try:
        with (
            open(archive, "rb") as raw,
            tqdm.wrapattr(
                raw, "read", total=archive.stat().st_size, desc="unpack", disable=None
            ) as watched,
            tarfile.open(fileobj=watched, mode="r|gz") as tar,
        ):
            for member in tar:
                path = PurePosixPath(member.name)
                if not (member.isfile() and path.name == _FILE and path.is_relative_to(inner)):
                    continue
                name = str(path.relative_to(inner).parent)
                if name in missing:
                    missing.discard(name)
                    file = staging / name / _FILE
                    file.parent.mkdir(parents=True, exist_ok=True)
                    content = tar.extractfile(member)
                    assert content is not None  # it is a file
                    with content, open(file, "wb") as out:
                        shutil.copyfileobj(content, out, _CHUNK)
        if missing:
            raise ValueError(f"{archive}: lacks {inner}/{min(missing)}/{_FILE}; {again}")
        for name in wanted if verify else ():
            if (found := _md5(staging / name / _FILE)) != OC20_FILES[name].md5:
                expected = OC20_FILES[name].md5
                raise ValueError(
                    f"{archive}: {name}/{_FILE}: expected md5 {expected}; got {found}; {again}"
                )
        for name in wanted:
            target = _target(directory, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / name / _FILE, target)
    except (tarfile.TarError, zlib.error, EOFError) as error:
        raise ValueError(f"{archive}: not a complete tar.gz; {error}; {again}") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
