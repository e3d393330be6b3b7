"""Writing files so that they appear complete or not at all, and seeing that they have stayed so."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import reprlib
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

__all__ = [
    "append",
    "appending",
    "atomically",
    "clear_parts",
    "expect_readable",
    "expect_writable",
    "read_arrays",
    "readable_size",
    "save_tensors",
    "shown",
    "verify_tensors",
    "write_atomically",
]

_UNREADABLE = (OSError, ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error)
_MOST_ARRAYS = 2**28  # bytes of an npz, unpacked
_ADVICE = dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "choose a place you may write to")
_ADVICE |= dict.fromkeys((errno.EISDIR, errno.ENOTDIR, errno.ENOENT), "choose another name")
_BLANK = b"0" * 64  # stands where the digest of a file will be, while it is computed


@contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """Lets a file appear complete or not at all; an older one stays until then.

    Args:
        path: file to write; folders above it are made.

    Yields:
        An empty file next to `path`, to be written or replaced; it takes the name of `path` when
        the block ends without an error, with the permissions of any file the user writes.

    Raises:
        OSError: naming the file, for instance on a full disk; the older file is kept.
    """
    try:
        _make_folder(path.parent)
    except OSError as error:
        raise _not_written(path, error, "there is no folder for it") from error
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.touch()
        mode = part.stat().st_mode
        yield part
        os.chmod(part, mode)  # some libraries write a private file in its place
        with open(part, "rb+") as file:
            os.fsync(file.fileno())  # or a crash could leave the new name on old blocks
        os.replace(part, path)
        _sync_folder(path.parent)
    except OSError as error:
        kept = (
            "the one written before is kept" if os.path.exists(path) else "there is none before it"
        )
        raise _not_written(path, error, kept) from error
    finally:
        with suppress(OSError):  # there is none, or nobody may look
            part.unlink()


def clear_parts(folder: Path) -> None:
    """Removes what processes that were killed had begun to write in a folder."""
    for part in folder.glob(".*.part"):
        pid = part.name.split(".")[-2]
        if pid.isdecimal() and not _is_alive(int(pid)):
            part.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    if os.name != "posix":  # where a signal of 0 is not a question
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _not_written(path: Path, error: OSError, kept: str) -> OSError:
    advice = _ADVICE.get(error.errno or 0, "free some space, then try again")
    return OSError(f"{path}: could not be written ({error.strerror or error}); {kept}; {advice}")


def expect_writable(path: Path, *read: Path) -> None:
    """Refuses a file to write later, before what it shall hold is computed; writes nothing.

    Args:
        path: the file; folders above it may be missing.
        read: what its content will be computed from.

    Raises:
        OSError: naming the file, if nothing can be written in its place.
        ValueError: if it is one of those that are read.
    """
    try:
        for one in read:
            if path.exists() and one.exists() and path.samefile(one):
                raise ValueError(
                    f"{path}: is what is read, and would be overwritten; expected another file to "
                    "write; choose another name"
                )
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        folder = next(each for each in path.absolute().parents if each.exists())
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _not_written(path, error, "nothing was computed") from error


def expect_readable(path: Path) -> None:
    """Raises the OSError of a file that may not be read; safetensors says that there is none."""
    with open(path, "rb"):
        pass


def append(path: Path, text: str) -> None:
    """Appends to a file that exists, and waits until the disk has it.

    Raises:
        OSError: naming the file, which is then as before.
    """
    with appending(path):
        size = path.stat().st_size
        try:
            with open(path, "a", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:  # an interruption, too
            with suppress(OSError):
                os.truncate(path, size)
            raise


@contextmanager
def appending(path: Path) -> Iterator[None]:
    """Names the file in errors of what appends to it in the block."""
    try:
        yield
    except OSError as error:
        raise _not_written(path, error, "what it held is kept") from error


def _make_folder(folder: Path) -> None:
    """With those above it, whose names are then on the disk too."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """Writes the names in a folder to the disk, where the system knows how (Windows does not)."""
    if os.name == "posix":
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes bytes as :func:`atomically` does."""
    with atomically(path) as part:
        part.write_bytes(content)


def save_tensors(
    path: Path,
    tensors: Mapping[str, Tensor] | Mapping[str, np.ndarray],
    metadata: Mapping[str, str],
) -> None:
    """Writes a safetensors file as :func:`atomically` does, with its own sha256 in its header.

    The digest is that of the whole file with 64 zeros in the digest's place. The same tensors and
    metadata give the same bytes.

    Args:
        path: file to write.
        tensors: all of torch, contiguous and on the CPU, or all of numpy.
        metadata: what else the header holds; not ``sha256``.

    Raises:
        OSError: naming the file, for instance on a full disk.
    """
    from safetensors import SafetensorError

    kind = "torch" if any(hasattr(tensor, "detach") for tensor in tensors.values()) else "numpy"
    save_file: Callable[..., None] = resolve_name(f"safetensors.{kind}:save_file")
    with atomically(path) as part:
        try:
            save_file(dict(tensors), part, metadata={**metadata, "sha256": _BLANK.decode()})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        with open(part, "rb+") as file:
            size = file.read(8)
            header = json.loads(file.read(int.from_bytes(size, "little")))
            # the library's order is another one in each process
            header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
            text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
            text = text.ljust(int.from_bytes(size, "little"))
            digest = _sha256(size + text, file)
            file.seek(len(size))
            file.write(text.replace(_BLANK, digest.encode(), 1))


def read_arrays(
    path: Path, wanted: Collection[str], most: int = _MOST_ARRAYS
) -> dict[str, np.ndarray]:
    """Read all arrays of an npz file by name, without unpickling.

    Args:
        path: file to read.
        wanted: names that the file must have.
        most: bytes that all arrays may take.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: naming the file, if it is damaged, too large, or lacks one of `wanted`.
    """
    import numpy as np

    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected an npz")
    try:
        with zipfile.ZipFile(path) as packed:
            size = sum(member.file_size for member in packed.infolist())
        if size > most:
            raise ValueError(f"{size:,} bytes unpacked, above {most:,}")
        with np.load(path, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    except (*_UNREADABLE, NotImplementedError, RuntimeError, SyntaxError) as error:
        raise ValueError(f"{path}: expected an npz of arrays; {shown(str(error), 120)}") from None
    absent = [name for name in wanted if name not in found]
    if absent:
        raise ValueError(
            f"{path}: expected arrays {', '.join(wanted)}; got {shown(sorted(found))} without "
            f"{absent[0]}"
        )
    return found


def verify_tensors(path: Path) -> bool:
    """Whether a safetensors file is as :func:`save_tensors` wrote it; reads it once, in blocks.

    Args:
        path: file to read.

    Returns:
        True; False for a file without a digest, written by another program or an older version.

    Raises:
        ValueError: naming the file, if it is not complete or not what was written.
    """
    from safetensors import SafetensorError, safe_open

    expect_readable(path)
    try:
        with safe_open(path, framework="np") as opened:
            expected = (opened.metadata() or {}).get("sha256")
    except SafetensorError as error:
        raise ValueError(f"{path}: not a complete safetensors file; {str(error)[:100]}") from None
    if expected is None:
        return False
    with open(path, "rb") as file:
        size = file.read(8)
        text = file.read(int.from_bytes(size, "little"))
        found = _sha256(size + text.replace(expected.encode(), _BLANK, 1), file)
    if found != expected:
        raise ValueError(
            f"{path}: damaged since it was written; expected sha256 {expected[:12]!r}...; "
            f"got {found[:12]!r}...; get or write it again"
        )
    return True


def read_json(path: Path, most: int, expected: str, hint: str) -> object:
    """What a small JSON file holds.

    Args:
        path: file to read.
        most: bytes.
        expected: what messages say that it has to be.
        hint: what they say to do.

    Raises:
        ValueError: naming the file, if it is damaged or larger.
    """
    try:
        if (size := path.stat().st_size) > most:
            raise ValueError(f"it has {size:,} bytes")
        found: object = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected {expected}; {shown(str(error), 100)}; {hint}") from None
    return found


def shown(value: object, most: int = 80) -> str:
    """What messages show of a value that a file holds: its repr, without what lies beyond `most`.

    A repr has no control characters. That of nested lists is cut where they begin to be long.
    """
    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = brief.maxlong = most
    text = brief.repr(value)
    return text if len(text) <= most + 2 else f"{text[:most]}..."


def readable_size(size: float) -> str:
    """Bytes as "1.4 MB"."""
    if size < 1000:
        return f"{size:.0f} bytes"
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 1000:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"


def _sha256(head: bytes, rest: IO[bytes]) -> str:
    """Digest of bytes and of all that is left to read in a file."""
    digest = hashlib.sha256(head)
    return hashlib.file_digest(rest, lambda: digest).hexdigest()  # type: ignore[arg-type]
