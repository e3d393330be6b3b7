"""Downloads public archives, and checks disk space and MD5 checksums."""

import hashlib
import os
import shlex
import shutil
import tarfile
import time
import zlib
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any, Literal
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from tqdm import tqdm

from molflt.data.structures.sources import OC20_ARCHIVE, OC20_FILES, VAL_SPLITS, _Archive
from molflt.files import atomically, readable_size
from molflt.lock import FolderLock

GAME_NET = _Archive(
    base_url="https://raw.githubusercontent.com/ChenglongWang/GAME-Net/"
    "7850f6229061d7b48af7728d2c40b28cf8bb7f9c/benchmarks/ocp/datasets",
    name="FG_dataset_lite.tar.xz",
    md5="e1e8f964e5634df436e9a5ecbd616fae",
)

_CHUNK = 1 << 20  # bytes copied at once
_ATTEMPTS = 5  # maximum number of consecutive connections without progress
_TIMEOUT = 60.0  # s
_SPLITS = ["10k/train", *VAL_SPLITS]
_FILE = "data.lmdb"


def download(
    dataset: Literal["oc20-is2re", "game-net"],
    directory: Path,
    splits: list[str] = _SPLITS,
    base_url: str | None = None,
    md5: str | None = None,
    keep_archive: bool = False,
) -> None:
    """Downloads a public archive to DIRECTORY and verifies it.

    oc20-is2re is an 8.1 GB archive of all splits (CC-BY-4.0); the requested splits are unpacked to
    DIRECTORY/is2re. game-net is GAME-Net's FG set, 3.1 MB (MIT), which scripts/game_net.py in the
    repository reads. Interrupted downloads are resumed; MD5 checksums are verified.

    Args:
        dataset: name of the data set.
        directory: folder to download and unpack into.
        splits: splits of OC20 to unpack: 10k/train, 100k/train, all/train, val_id, val_ood_ads,
            val_ood_cat, val_ood_both, test_id, test_ood_ads, test_ood_cat, test_ood_both.
        base_url: URL of the folder that contains the archive; set it to use a mirror.
        md5: expected MD5 checksum of the archive, even if the archive already exists.
        keep_archive: keep OC20's archive after unpacking.
    """
    if dataset == "game-net" and (keep_archive or list(splits) != _SPLITS):
        raise ValueError(
            "--splits and --keep_archive are for oc20-is2re; got game-net; remove them"
        )
    wanted = list(dict.fromkeys(_official_name(split) for split in splits))
    doing = "is downloading to this folder; wait for it, or choose another folder"
    with FolderLock(directory, doing, ".lock.download").held():
        if dataset == "game-net":
            archive, md5 = directory / GAME_NET.name, (md5 or GAME_NET.md5).lower()
            print(f"{archive.name}: md5 {md5}; license MIT, (c) 2022 iciq-tcc / nlopez-group")
            _get(archive, base_url or GAME_NET.base_url, md5, 0)
            print("next: python scripts/game_net.py", shlex.join([str(archive), f"{directory}/fg"]))
            return
        missing = [name for name in wanted if not _target(directory, name).is_file()]
        if not missing:
            print(f"{directory}: already contains {', '.join(wanted)}")
            return
        archive, md5 = directory / OC20_ARCHIVE.name, (md5 or OC20_ARCHIVE.md5).lower()
        unpacked = int(sum(OC20_FILES[name].gigabytes for name in missing) * 1e9)
        _get(archive, base_url or OC20_ARCHIVE.base_url, md5, unpacked)
        _unpack(archive, directory, missing)
        if not keep_archive:
            archive.unlink()
    for path in (_target(directory, name) for name in missing):
        print(f"{path}: {readable_size(path.stat().st_size)}")
    first = shlex.quote(str(_target(directory, missing[0])))
    print(f"next: molflt data convert {first} FILE.safetensors")


def _target(directory: Path, name: str) -> Path:
    return directory / "is2re" / name / _FILE


def _official_name(split: str) -> str:
    name = split if "/" in split else f"all/{split}"
    if name not in OC20_FILES or split == "train":
        raise ValueError(
            f"splits: expected one or more of {', '.join(OC20_FILES)}; all/ is optional for "
            f"validation and test splits; got {split!r}"
        )
    return name


def _expect_md5(path: Path, md5: str, advice: str) -> None:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "md5").hexdigest()
    if digest != md5:
        raise ValueError(f"{path}: expected md5 {md5}; got {digest}; {advice}")


def _get(archive: Path, base_url: str, md5: str, unpacked: int) -> None:
    """Downloads or verifies an archive; `unpacked` is the size of its content in bytes."""
    if archive.is_file():
        _check_space(archive, 0, archive.stat().st_size, unpacked)
        _expect_md5(archive, md5, "delete it to download it again, or set --md5")
        return
    part = archive.with_name(f"{archive.name}.part")
    _fetch(f"{base_url.rstrip('/')}/{archive.name}", part, unpacked)
    try:
        advice = "the download was damaged or is another file; run the same command again"
        _expect_md5(part, md5, advice)
    except ValueError:
        part.unlink()
        raise
    os.replace(part, archive)


def _check_space(file: Path, missing: int, size: int, unpacked: int) -> None:
    """Prints the size of a download; raises ValueError if there is not enough disk space."""
    free = shutil.disk_usage(file.parent).free
    print(
        f"{file.name.removesuffix('.part')}: {readable_size(size)}, "
        f"{readable_size(size - missing)} of it already downloaded; unpacked: "
        f"{readable_size(unpacked)}; {readable_size(free)} free in {file.parent}",
        flush=True,
    )
    if missing + unpacked > free:
        raise ValueError(
            f"{file.parent}: not enough disk space: {readable_size(missing + unpacked)} needed; "
            f"{readable_size(free)} free; choose fewer splits or another directory"
        )


def _fetch(url: str, part: Path, unpacked: int) -> None:
    """Downloads a file, or the rest of a partial file; retries as long as data keeps arriving."""
    attempts, size = 0, None
    while attempts < _ATTEMPTS:
        before = part.stat().st_size if part.exists() else 0
        problem: Exception = ConnectionError("the server stopped sending")
        try:
            request = Request(url, headers={"Range": f"bytes={before}-"} if before else {})
            with urlopen(request, timeout=_TIMEOUT) as reply:
                start = before if reply.status == 206 else 0  # 200: the whole file
                total = start + int(reply.headers.get("Content-Length", 0))
                if size is None:
                    _check_space(part, total - before, total, unpacked)
                size = total
                with (
                    open(part, "ab" if start else "wb") as raw,
                    _bar(raw, "write", total, part.stem, start) as out,
                ):
                    shutil.copyfileobj(reply, out, _CHUNK)
            if part.stat().st_size >= total:
                return
        except HTTPError as error:
            if error.code == 416:  # nothing is missing
                return
            if error.code < 500 and error.code not in (408, 429):  # temporary
                advice = "check the address, which --base_url sets"
                raise OSError(f"{url}: cannot be downloaded; {error}; {advice}") from None
            problem = error
        except (HTTPException, URLError, ConnectionError, TimeoutError) as error:
            problem = error
        after = part.stat().st_size if part.exists() else 0
        attempts = attempts + 1 if after == before else 0
        time.sleep(0.1 * 2.0**attempts)
    advice = "run the same command again to continue, or choose a mirror with --base_url"
    raise OSError(f"{url}: cannot be downloaded; {problem}; {advice}")


def _bar(file: IO[bytes], method: str, total: int, name: str, start: int = 0) -> Any:
    """Wraps a file; a progress bar shows the bytes that pass through `method`."""
    options = {"unit": "B", "unit_scale": True, "disable": None}
    return tqdm.wrapattr(file, method, total=total, initial=start, desc=name, **options)


def _unpack(archive: Path, directory: Path, wanted: list[str]) -> None:
    """Unpacks the files `wanted` (keys of `OC20_FILES`) to ``directory/is2re/KEY/data.lmdb``."""
    advice = "delete it and download again"
    missing = {f"{OC20_ARCHIVE.inner}/{name}/{_FILE}": name for name in wanted}
    try:
        with (
            open(archive, "rb") as raw,
            _bar(raw, "read", archive.stat().st_size, "unpack") as watched,
            tarfile.open(fileobj=watched, mode="r|gz") as tar,
        ):
            for member in tar:
                if member.name not in missing or (file := tar.extractfile(member)) is None:
                    continue
                target = _target(directory, missing.pop(member.name))
                with atomically(target) as part, open(part, "wb") as out:
                    shutil.copyfileobj(file, out, _CHUNK)
    except (tarfile.TarError, zlib.error, EOFError) as error:
        raise ValueError(f"{archive}: not a complete tar.gz; {error}; {advice}") from None
    if missing:
        raise ValueError(f"{archive}: does not contain {', '.join(missing)}; {advice}")
