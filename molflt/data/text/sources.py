"""Where texts come from: files, compressed or not, and Hugging Face data sets."""

from __future__ import annotations

import codecs
import gzip
import io
import itertools
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from molflt.data.hub import dataset_loader
from molflt.data.text.vocabulary import _Level

_BLOCK = 2**22  # bytes read at once: their words take some 100 MB as Python objects
_HF = "hf:"
_SPLITS = {"train": "train", "val": "validation", "test": "test"}


def _text_blocks(source: str, level: _Level = "word", use: str = "train") -> Iterator[bytes | str]:
    """Pieces of a text as `Vocabulary` reads them: bytes, text, or text in whole lines.

    Args:
        source: file or hf: name, see `molflt.data.text.datamodule.TextData`.
        level: of the tokens. Only bytes need not be UTF-8.
        use: "train", "val" or "test": which split of a Hugging Face data set if none is named.

    Raises:
        ValueError: naming the file, and the offset of the first byte that is not UTF-8.
        FileNotFoundError: naming the file.
    """
    raw = _rows(source, use) if source.startswith(_HF) else _file(Path(source))
    if level == "byte":
        return raw
    text = _decoded(raw, source)
    return _lines(text) if level == "word" else text


def _file(path: Path) -> Iterator[bytes]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected a text, plain or as .gz or .xz")
    packed: dict[str, Callable[[Path], io.BufferedIOBase]]
    packed = {".gz": gzip.GzipFile, ".xz": lzma.LZMAFile}
    unpack = packed.get(path.suffix)
    try:
        with open(path, "rb") if unpack is None else unpack(path) as file:
            while block := file.read(_BLOCK):
                yield block
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
        raise ValueError(
            f"{path}: expected a whole {path.suffix} file; got one that cannot be unpacked "
            f"({error}); get it again"
        ) from None


def _decoded(raw: Iterable[bytes], source: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    done = 0
    for block in itertools.chain(raw, (b"",)):
        waiting = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{source}: byte {done - waiting + error.start} is not UTF-8 ({error.reason}); "
                "expected a text in UTF-8; convert it, or use data.level byte"
            ) from None
        done += len(block)
        if text:
            yield text


def _lines(blocks: Iterable[str]) -> Iterator[str]:
    """The same text cut after line breaks; the last line gets one where it has none."""
    rest = ""
    for block in blocks:
        whole, _, after = block.rpartition("\n")
        if not whole and not block.startswith("\n"):
            rest += block
            continue
        yield f"{rest}{whole}\n"
        rest = after
    if rest:
        yield f"{rest}\n"


def _rows(source: str, use: str) -> Iterator[bytes]:
    """Rows of a Hugging Face data set, a line or more each."""
    name, _, which = source.removeprefix(_HF).partition(":")
    split, _, column = which.partition(".")
    split, column = split or _SPLITS[use], column or "text"
    load = dataset_loader(source)
    parts = name.split("/")
    # OWNER/NAME is how data sets are called today; NAME/CONFIG is tried where there is none.
    tries: dict[int, list[tuple[str, ...]]] = {
        1: [(name,)],
        2: [(name,), tuple(parts)],
        3: [("/".join(parts[:2]), *parts[2:])],
    }
    errors = []
    for arguments in tries.get(len(parts), []):
        try:
            rows = load(*arguments, split=split)
            break
        except Exception as error:  # of many kinds, network and names alike
            errors.append(str(error).splitlines()[0] if str(error) else type(error).__name__)
    else:
        raise ValueError(
            f"{source}: cannot be loaded ({'; '.join(errors) or 'no such form'}); expected "
            "hf:NAME[/CONFIG][:SPLIT[.COLUMN]]"
        )
    if column not in rows.column_names:
        raise ValueError(
            f"{source}: has no column {column!r}; expected one of {', '.join(rows.column_names)}"
        )
    for row in rows:
        text = row[column]
        if not isinstance(text, str):
            raise ValueError(f"{source}: column {column!r} must hold texts; got {text!r}")
        yield (text if text.endswith("\n") else f"{text}\n").encode()
