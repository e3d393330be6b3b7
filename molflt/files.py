"""Files: atomic writes, CSV, JSON, compressed and safetensors files; texts for messages."""

from __future__ import annotations

import bz2
import csv
import errno
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import reprlib
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from pkgutil import resolve_name
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

_Row = Mapping[str, object]
_NO_SPACE = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}  # Windows has no EDQUOT
_BLANK = b"0" * 64  # placeholder of the digest while it is computed
_OPENERS: dict[str, Callable[..., IO[Any]]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


def is_first_process() -> bool:
    """Returns True in one process per machine of distributed training."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def warn(text: str) -> None:
    """Prints a one-line warning, once per machine in distributed training."""
    if is_first_process():
        print(f"molflt: warning: {text}", file=sys.stderr)


@contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """Writes a file completely or not at all; an existing file is replaced only at the end.

    Yields the path of an empty file next to `path`, which the block can write or replace. This file
    is renamed to `path` when the block ends without an error. Missing folders are created.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_written(path, error, "its folder cannot be created") from error
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.touch()
        mode = part.stat().st_mode
        yield part
        os.chmod(part, mode)  # some libraries replace the file with a private file
        with open(part, "rb+") as file:
            os.fsync(file.fileno())  # otherwise a crash could leave the new name without content
        os.replace(part, path)
    except OSError as error:
        outcome = "the earlier file is kept" if os.path.isfile(path) else "no file was written"
        raise _not_written(path, error, outcome) from error
    finally:
        with suppress(OSError):  # the file was renamed, or the folder is not readable
            part.unlink()


def write_atomically(path: Path, content: bytes) -> None:
    """Writes bytes with :func:`atomically`."""
    with atomically(path) as part:
        part.write_bytes(content)


def append(path: Path, text: str) -> None:
    """Appends to an existing file and flushes it to disk; on failure the file is unchanged."""
    with appending(path):
        size = path.stat().st_size
        try:
            with open(path, "a", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:  # including KeyboardInterrupt
            with suppress(OSError):
                os.truncate(path, size)
            raise


@contextmanager
def appending(path: Path) -> Iterator[None]:
    """Adds the file name to any OSError that the block raises while it appends to the file."""
    try:
        yield
    except OSError as error:
        raise _not_written(path, error, "its content is kept") from error


def _not_written(path: Path, error: OSError, outcome: str) -> OSError:
    # errors of safetensors have only a text
    is_full = error.errno in _NO_SPACE or os.strerror(errno.ENOSPC) in str(error)
    advice = "free some space" if is_full else "choose another name or folder"
    return OSError(f"{path}: could not be written ({error.strerror or error}); {outcome}; {advice}")


def clear_parts(folder: Path, name: str = "*") -> None:
    """Removes unfinished files of `name` that killed processes of this machine left in a folder."""
    import psutil

    for part in folder.glob(f".{name}.*.part"):
        pid = part.name.split(".")[-2]
        if re.fullmatch("[0-9]{1,9}", pid) and not psutil.pid_exists(int(pid)):
            part.unlink(missing_ok=True)


def expect_ending(out: Path | None, *endings: str) -> None:
    """Raises ValueError if an output file does not have the expected extension."""
    if out is not None and out.suffix not in endings:
        expected = ", ".join(endings)
        raise ValueError(f"{out}: expected a name that ends in {expected}; got {out.suffix!r}")


def expect_writable(path: Path, *inputs: Path) -> None:
    """Raises OSError if a file cannot be written, or ValueError if it is one of the inputs.

    The parent folder does not need to exist; no file is written.
    """
    try:
        if path.exists() and any(file.exists() and path.samefile(file) for file in inputs):
            raise ValueError(
                f"{path}: is also the input and would be overwritten; expected a different "
                "output file; choose another name"
            )
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _not_written(path, error, "nothing was computed") from error


def add_row(path: Path, row: _Row, first: bool) -> None:
    """Adds a row to a CSV file; with `first`, starts a new file."""
    if first:
        write_atomically(path, csv_text([row]).encode())
    else:
        append(path, csv_text([row], header=False))


def csv_text(rows: Sequence[_Row], columns: Sequence[str] = (), header: bool = True) -> str:
    """Formats rows as CSV, by default with columns for all keys; None becomes an empty cell."""
    buffer = io.StringIO()
    names = columns or list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(buffer, names, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def csv_rows(text: str) -> list[dict[str, str]]:
    """Parses CSV text; raises ValueError or csv.Error if the text is malformed."""
    reader, rows = csv.DictReader(io.StringIO(text), strict=True), list[dict[str, str]]()
    for row in reader:
        if None in row or None in row.values():
            raise ValueError(f"line {reader.line_num} does not have as many cells as the header")
        rows.append(row)
    return rows


def read_json(path: Path, expected: str, hint: str, missing_ok: bool = False) -> Any:
    """Reads a JSON file; if it is damaged, raises ValueError with `expected` and `hint`.

    With `missing_ok`, returns None if the file does not exist.
    """
    if missing_ok and not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected {expected}; {shown(str(error), 100)}; {hint}") from None


def opened(path: Path, mode: str = "rb", **options: Any) -> IO[Any]:
    """Opens a plain or compressed file for reading."""
    return _OPENERS.get(path.suffix.lower(), open)(path, mode, **options)


@contextmanager
def unpacked(path: Path) -> Iterator[IO[bytes]]:
    """Opens a plain or compressed file for reading; raises ValueError if it is damaged."""
    try:
        with opened(path) as file:
            yield file
    except (OSError, lzma.LZMAError, zlib.error, EOFError) as error:
        if isinstance(error, OSError) and error.errno:  # not about the content
            raise
        raise ValueError(
            f"{path}: expected a complete {path.suffix} file; the file is damaged or truncated "
            f"({error}); download or copy it again"
        ) from None


def without_packing(path: Path) -> Path:
    """Removes the extension of a compressed file, such as .gz, from a path."""
    return path.with_suffix("") if path.suffix.lower() in _OPENERS else path


def packed_names(name: str) -> list[str]:
    """Returns the names that a file may have: plain, or with the extension of a compressed file."""
    return [name, *(name + ending for ending in _OPENERS)]


def save_tensors(
    path: Path,
    tensors: Mapping[str, Tensor] | Mapping[str, np.ndarray],
    metadata: Mapping[str, str],
) -> None:
    """Writes a safetensors file with :func:`atomically`, with its SHA-256 digest in the header.

    The digest is computed with 64 zeros in its place. Equal tensors and metadata produce
    identical files. `metadata` contains additional header entries, other than ``sha256``.
    """
    from safetensors import SafetensorError

    kind, content = "numpy", dict[str, Any](tensors)
    if any(hasattr(tensor, "detach") for tensor in content.values()):
        kind = "torch"
        content = {name: x.detach().cpu().contiguous() for name, x in content.items()}
    save_file: Callable[..., None] = resolve_name(f"safetensors.{kind}:save_file")
    with atomically(path) as part:
        try:
            save_file(content, part, metadata={**metadata, "sha256": _BLANK.decode()})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        with open(part, "rb+") as file:
            size, header = _size_and_header(file)
            entries = json.loads(header)
            # the library writes entries in a different order in each process
            entries["__metadata__"] = dict(sorted(entries["__metadata__"].items()))
            text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
            text = text.ljust(len(header))
            digest = hashlib.file_digest(file, lambda: hashlib.sha256(size + text))
            file.seek(len(size))
            file.write(text.replace(_BLANK, digest.hexdigest().encode(), 1))


def read_header(path: Path) -> dict[str, str]:
    """Returns the metadata of a safetensors file; raises ValueError if the file is incomplete."""
    from safetensors import SafetensorError, safe_open

    open(path, "rb").close()  # safetensors reports unreadable files as missing
    try:
        with safe_open(path, framework="np") as file:
            return file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path}: not a complete safetensors file; {str(error)[:100]}") from None


def verify_tensors(path: Path) -> bool:
    """Compares a safetensors file with its digest; raises ValueError if they differ.

    Returns False for files without a digest, as written by other programs and older versions.
    """
    expected = read_header(path).get("sha256")
    if expected is None:
        return False
    with open(path, "rb") as file:
        size, header = _size_and_header(file)
        header = header.replace(expected.encode(), _BLANK, 1)
        digest = hashlib.file_digest(file, lambda: hashlib.sha256(size + header)).hexdigest()
    if digest != expected:
        raise ValueError(
            f"{path}: damaged since it was written; expected sha256 {expected[:12]!r}...; "
            f"got {digest[:12]!r}...; download or write it again"
        )
    return True


def _size_and_header(file: IO[bytes]) -> tuple[bytes, bytes]:
    size = file.read(8)
    return size, file.read(int.from_bytes(size, "little"))


def shown(value: object, most: int = 80) -> str:
    """Returns the repr of a value, shortened to about `most` characters, for messages."""
    shortened = reprlib.Repr()
    shortened.maxstring = shortened.maxother = shortened.maxlong = most
    text = shortened.repr(value)
    return text if len(text) <= most + 2 else f"{text[:most]}..."


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Returns ``; did you mean ...?`` if `word` resembles a name or its last part, otherwise ""."""
    whole = {name: name for name in names}
    last = {re.split("[./]", name)[-1].removeprefix("--"): name for name in names}
    for typed, known in ((word, whole), (re.split("[./]", word)[-1].removeprefix("--"), last)):
        if close := get_close_matches(typed, known, 1, 0.7):
            return f"; did you mean {known[close[0]]}?"
    return ""


def natural(path: Path) -> list[str | int]:
    """Returns a sort key for natural order, in which 2.vasp precedes 10.vasp."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", str(path))]


def counted(count: int, name: str) -> str:
    """Returns a number with a noun, such as "1 structure" or "2,000 structures"."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def readable_size(size: float) -> str:
    """Formats a number of bytes with a unit, such as "1.4 MB"."""
    if size < 1000:
        return f"{size:.0f} bytes"
    power = min(4, (len(str(int(size))) - 1) // 3)  # of 1000
    return f"{size / 1000**power:.1f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"
