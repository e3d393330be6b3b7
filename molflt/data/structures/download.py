"""Fetching public archives: checked for space, resumed, verified; OC20's is unpacked in part."""

from __future__ import annotations

import os
import re
import shutil
import time
import urllib.request
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse, InvalidURL
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn, cast
from urllib.error import HTTPError, URLError

from tqdm import tqdm

from molflt.data.structures.splits import OC20_ARCHIVE, OC20_FILES, VAL_SPLITS
from molflt.data.structures.unpack import _md5, _target, _unpack, _unpacked_size
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
_ATTEMPTS = 5  # connections in a row that bring nothing
_TIMEOUT = 60.0  # s
_SPLITS = ["10k/train", *VAL_SPLITS]
_DOING = "is downloading to this folder; wait for it, or choose another folder"
_BUSY = (408, 429)  # that pass, like all from 500 on
_HANDLERS = (  # those of urllib without ftp, file and data, to which a server could redirect
    urllib.request.ProxyHandler,
    urllib.request.UnknownHandler,
    urllib.request.HTTPHandler,
    urllib.request.HTTPSHandler,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.HTTPRedirectHandler,
    urllib.request.HTTPErrorProcessor,
)


def download(
    dataset: Literal["oc20-is2re", "game-net"],
    directory: Path,
    splits: list[str] = _SPLITS,
    base_url: str | None = None,
    md5: str | None = None,
    keep_archive: bool = False,
) -> None:
    """Download a public archive to DIRECTORY and verify it.

    oc20-is2re: one archive for all splits, 8.1 GB (CC-BY-4.0); the wanted ones are unpacked to
    DIRECTORY/is2re. game-net: GAME-Net's FG set, 3.1 MB (MIT), left as it is for
    scripts/game_net.py of the repository. An interrupted download is taken up where it ended; md5
    sums are verified.

    Args:
        dataset: name of the data set.
        directory: folder to download and unpack into.
        splits: wanted splits of OC20: 10k/train, 100k/train, all/train, val_id, val_ood_ads,
            val_ood_cat, val_ood_both, test_id, test_ood_ads, test_ood_cat, test_ood_both.
        base_url: where the archive lies, for mirrors.
        md5: expected md5 of the archive, also of one that is already there; with another than the
            official one the sums of OC20's unpacked files are not known, only their size is
            bounded.
        keep_archive: keep OC20's archive after unpacking.
    """
    alone = FolderLock(directory, _DOING, ".lock.download").held
    if dataset == "game-net":
        if keep_archive or list(splits) != _SPLITS:
            raise ValueError(
                "--splits and --keep_archive are for oc20-is2re; got game-net, whose archive is "
                "left as it is; leave them out"
            )
        with alone():
            _download_game_net(directory, base_url or GAME_NET.base_url, md5 or GAME_NET.md5)
        return
    wanted = list(dict.fromkeys(_official_name(split) for split in splits))
    if not wanted:
        raise ValueError("splits: expected at least one of " + ", ".join(OC20_FILES))
    missing = [name for name in wanted if not _target(directory, name).is_file()]
    if not missing:
        print(f"{directory}: already has {', '.join(wanted)}")
        return
    with alone():
        _download_oc20(directory, missing, base_url, md5, keep_archive)


def _download_oc20(
    directory: Path, missing: list[str], base_url: str | None, md5: str | None, keep_archive: bool
) -> None:
    """Downloads the archive and unpacks missing parts; see `download`."""
    archive = directory / OC20_ARCHIVE.name
    md5 = (md5 or OC20_ARCHIVE.md5).lower()
    official = md5 == OC20_ARCHIVE.md5
    _get(
        archive,
        base_url or OC20_ARCHIVE.base_url,
        md5,
        lambda size: _unpacked_size(missing, size, official),
        f"unpacking {', '.join(missing)}",
    )
    _unpack(archive, directory, missing, verify=official)
    if not keep_archive:
        archive.unlink()
    for name in missing:
        print(
            f"{_target(directory, name)}: {readable_size(_target(directory, name).stat().st_size)}"
        )
    print(f"next: molflt data convert {_target(directory, missing[0])} FILE.safetensors")


def _download_game_net(directory: Path, base_url: str, md5: str) -> None:
    archive = directory / GAME_NET.name
    print(f"{archive.name}: md5 {md5.lower()}; licence {GAME_NET.licence}")
    _get(archive, base_url, md5.lower(), lambda size: 2 * size, "its compact store")
    print(f"next: python scripts/game_net.py {archive} {directory / 'fg'}")


def _get(archive: Path, base_url: str, md5: str, unpacked: Callable[[int], int], what: str) -> None:
    """Makes an archive be there, as a whole.

    Args:
        archive: where it is to be.
        base_url: where it lies.
        md5: its sum.
        unpacked: bytes that it takes when unpacked, of its own.
        what: that then is.
    """
    archive.parent.mkdir(parents=True, exist_ok=True)
    url = f"{base_url.rstrip('/')}/{archive.name}"
    complete = archive.is_file()
    size = archive.stat().st_size if complete else _remote_size(url)
    _check_space(archive, size, unpacked(size), what)
    if not complete:
        _fetch(url, archive, md5, size)
    elif (found := _md5(archive)) != md5:
        raise ValueError(
            f"{archive}: expected md5 {md5}; got {found}; delete it to download it again, or give "
            "its sum as --md5"
        )


def _official_name(split: str) -> str:
    name = split if "/" in split else f"all/{split}"
    if name not in OC20_FILES or split == "train":
        raise ValueError(
            f"splits: expected some of {', '.join(OC20_FILES)}, validation and test also without "
            f"all/; got {split!r}"
        )
    return name


def _part(archive: Path) -> Path:
    return archive.with_name(f"{archive.name}.part")


def _open(url: str, method: str = "GET", start: int = 0) -> HTTPResponse:
    """Connects by http or https, also where redirected to."""
    opener = urllib.request.OpenerDirector()
    for handler in _HANDLERS:
        opener.add_handler(handler())
    request = urllib.request.Request(url, method=method)
    if start:
        request.add_header("Range", f"bytes={start}-")
    return cast(HTTPResponse, opener.open(request, timeout=_TIMEOUT))


def _declared(reply: HTTPResponse) -> int | None:
    """Bytes that a reply says it has; None if it does not say so in a number."""
    length = reply.headers.get("Content-Length", "")
    return int(length) if re.fullmatch("[0-9]{1,18}", length) else None


def _remote_size(url: str) -> int:
    try:
        with _open(url, "HEAD") as reply:
            size = _declared(reply)
    except (OSError, HTTPException, ValueError) as error:
        _unreachable(url, error)
    if not size:
        got = repr(reply.headers.get("Content-Length", "none")[:80])
        raise OSError(
            f"{url}: expected the server to say how large the file is; got Content-Length {got}; "
            "use another mirror, --base_url"
        )
    return size


def _unreachable(url: str, error: Exception) -> NoReturn:
    reason = getattr(error, "reason", None) or error
    advice = "run the same command again to continue"
    if isinstance(error, HTTPError):
        reason = f"HTTP {error.code} {error.reason or ''}".strip()
    if _is_wrong(error):
        advice = "is the address right? --base_url changes it"
    raise OSError(f"{url}: cannot be downloaded; {reason}; {advice}") from None


def _is_wrong(error: Exception) -> bool:
    """Returns True if the address is wrong or the server refuses the file."""
    if isinstance(error, HTTPError):
        return error.code < 500 and error.code not in _BUSY
    if isinstance(error, URLError):
        return not isinstance(error.reason, OSError)
    return isinstance(error, InvalidURL | ValueError)


def _is_network(error: Exception) -> bool:
    """Returns True if a retry may help: not for wrong addresses or full disks."""
    connection = (HTTPException, URLError, ConnectionError, TimeoutError)
    return isinstance(error, connection) and not _is_wrong(error)


def _check_space(archive: Path, size: int, unpacked: int, what: str) -> None:
    """Say what will be downloaded and refuse if the disk cannot hold it."""
    directory = archive.parent
    here = archive if archive.exists() else _part(archive)
    have = here.stat().st_size if here.exists() else 0
    needed = max(size - have, 0) + unpacked
    free = shutil.disk_usage(directory).free
    print(
        f"{archive.name}: {readable_size(size)}, {readable_size(have)} of it already here; "
        f"{what}: {readable_size(unpacked)}; {readable_size(free)} free in {directory}",
        flush=True,
    )
    if needed > free:
        raise ValueError(
            f"{directory}: not enough disk: {readable_size(needed)} needed; "
            f"{readable_size(free)} free; choose fewer splits or another directory"
        )


def _fetch(url: str, file: Path, md5: str, size: int) -> None:
    """Download `size` bytes, continuing what an earlier call left, and verify them."""
    part = _part(file)
    if part.is_symlink():
        raise ValueError(
            f"{part}: is a symbolic link; a download would write to its target; remove it"
        )
    if part.exists() and part.stat().st_size > size:
        part.unlink()
    idle = 0
    with tqdm(total=size, unit="B", unit_scale=True, desc=file.name, disable=None) as bar:
        while (have := part.stat().st_size if part.exists() else 0) < size:
            bar.n = have
            bar.refresh()
            error: Exception | None = None
            try:
                _receive(url, part, have, size, bar)
            except (OSError, HTTPException) as problem:
                if not _is_network(problem):
                    _unreachable(url, problem)
                error = problem
            progress = part.exists() and part.stat().st_size > have
            idle = 0 if progress else idle + 1
            if idle == _ATTEMPTS:
                _unreachable(url, error or ConnectionError("the server stopped sending"))
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


def _receive(url: str, part: Path, have: int, size: int, bar: tqdm) -> None:
    """Appends to the file, up to `size` bytes in total."""
    with _open(url, start=have) as reply:
        # 206 continues; a server without ranges answers 200 with the whole file
        continues = reply.status == 206
        left = size - have if continues else size
        if (sent := _declared(reply)) not in (None, left):
            raise ValueError(
                f"{url}: expected {left:,} bytes, as the server declared; got {sent:,}; it changes "
                "or is not a file; use another mirror, --base_url"
            )
        bar.n = size - left
        with open(part, "ab" if continues else "wb") as out:
            while left and (block := reply.read1(min(_CHUNK, left))):
                out.write(block)
                left -= len(block)
                bar.update(len(block))
