"""Damage inside of a format: trees of JSON and YAML, words of texts, safetensors, LMDB pages."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import struct
from random import Random
from typing import Any

from fuzzing.mutate import FLOATS, INTEGERS, damage, flip_bit, put_magic

Tree = Any  # of dictionaries, lists and plain values

WORDS = (
    *("", "null", "true", "nan", "-inf", "~", "0x10", "1e999", "\0", "\x1b[31m", "ü" * 300, ".."),
    *("9" * 5000, "-1", "1_000", "!!python/name:os.system", "${x}", "[", "{", "a: b: c", "*a"),
)


def value(draw: Random) -> Tree:
    """A plain value, or a small tree."""
    nested: Tree = draw.choice((None, True, [], {}))
    for _ in range(draw.choice((0, 1, 3, 80))):
        nested = [nested]
    choices = (draw.choice(INTEGERS), draw.choice(FLOATS), draw.choice(WORDS), nested, {"a": 1})
    return draw.choice(choices)


def _places(tree: Tree) -> list[tuple[Tree, object]]:
    """(container, key) of every node below the root."""
    found: list[tuple[Tree, object]] = []
    nodes = tree if isinstance(tree, list) else ()
    for key, node in tree.items() if isinstance(tree, dict) else enumerate(nodes):
        found += [(tree, key), *_places(node)]
    return found


def damage_tree(draw: Random, tree: Tree) -> tuple[Tree, str]:
    """A tree with a node replaced, removed, renamed, added, repeated or exchanged."""
    changed = copy.deepcopy(tree)
    places = _places(changed)
    how = draw.choice(("replace", "replace", "replace", "remove", "rename", "add", "exchange"))
    if not places or (how == "replace" and draw.random() < 0.03):
        return value(draw), "replace all"
    box, key = draw.choice(places)
    if how == "replace":
        box[key] = value(draw)
    elif how == "remove":
        del box[key]
    elif how == "exchange":
        other, place = draw.choice(places)
        box[key], other[place] = copy.deepcopy((other[place], box[key]))
    elif isinstance(box, dict):
        name = f"{key}{draw.choice('sx_ .')}" if how == "rename" else str(draw.choice(WORDS))
        box[name] = box.pop(key) if how == "rename" else value(draw)
    else:
        box.insert(0, value(draw))
    return changed, f"{how} {str(key)[:40]}"


_NUMBER = re.compile(rb"[-+]?\d+\.?\d*(?:[eE][-+]?\d+)?")
_WORD = re.compile(rb"[^\s=:,\"'\[\]{}()]+")
NUMBERS = (
    *("0", "-1", "1", "3", "2147483648", "9223372036854775808", "99999999999999999999", "nan"),
    *("inf", "-inf", "1e308", "1e6", "0.02", "-0.0", "1e-300", "0x1p3", "1.5", "١", "1e999"),
)


def damage_text(draw: Random, text: bytes) -> tuple[bytes, str]:
    """A text with a number, word or line replaced, removed or repeated."""
    how = draw.choice(("number", "number", "number", "word", "line", "lines"))
    if how == "number":
        found = [match.span() for match in _NUMBER.finditer(text)]
        new = draw.choice(NUMBERS).encode()
    else:
        found = [match.span() for match in _WORD.finditer(text)]
        new = draw.choice((*WORDS, *NUMBERS)).encode()
    if how in ("line", "lines") or not found:
        lines = text.splitlines(keepends=True) or [b"\n"]
        at = draw.randrange(len(lines))
        times = draw.choice((0, 2, 3, 200)) if how == "line" else 1
        lines[at : at + 1] = [lines[at]] * times
        if how == "lines":
            draw.shuffle(lines)
        return b"".join(lines), f"line x{times}" if how == "line" else "lines shuffled"
    # of a text's numbers those of the first lines say most
    begin, end = found[min(draw.randrange(len(found)), draw.randrange(len(found)))]
    return text[:begin] + new + text[end:], f"{how} {text[begin:end][:20]!r} -> {new[:20]!r}"


def damage_numbers_in_place(draw: Random, content: bytes) -> tuple[bytes, str]:
    """Digits of ASCII numbers within binary content, whose places do not move."""
    found = [match.span() for match in re.finditer(rb"\d+", content)]
    if not found:
        return damage(draw, content)
    begin, end = draw.choice(found)
    digits = "".join(draw.choice("0123456789") for _ in range(end - begin)).encode()
    digits = draw.choice((digits, b"9" * len(digits), b"0" * len(digits)))
    return content[:begin] + digits + content[end:], "digits in place"


def split_tensors(content: bytes) -> tuple[dict[str, dict[str, object]], bytes]:
    """Header and data of a safetensors file."""
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join_tensors(header: Tree, data: bytes) -> bytes:
    """A safetensors file of a header that may be wrong."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def signed(content: bytes) -> bytes:
    """A safetensors file with its own sha256 in place of the digest that its header has, if any."""
    found = re.search(rb'"sha256": ?"([0-9a-f]{64})"', content[:100_000])
    if found is None:
        return content
    before, after = content[: found.start(1)], content[found.end(1) :]
    digest = hashlib.sha256(before + b"0" * 64 + after).hexdigest()
    return before + digest.encode() + after


def damage_tensors(draw: Random, content: bytes) -> tuple[bytes, str]:
    """A safetensors file with another header, tensors that change places, or other numbers."""
    header, data = split_tensors(content)
    names = [name for name in header if name != "__metadata__"]
    how = draw.choice(("tree", "tree", "bytes", "names", "numbers", "numbers", "types"))
    if how == "tree":
        changed, what = damage_tree(draw, header)
        return join_tensors(changed, data), f"header: {what}"
    if how == "names" and len(names) > 1:
        one, other = draw.sample(names, 2)
        header[one], header[other] = header[other], header[one]
        return join_tensors(header, data), f"{one} and {other} exchanged"
    if how == "types":
        name = draw.choice(names)
        header[name]["dtype"] = draw.choice(("F64", "F32", "I64", "U8", "BOOL", "BF16", "F8_E4M3"))
        return join_tensors(header, data), f"type of {name}"
    if how == "numbers" and data:
        begin = len(content) - len(data)
        return content[:begin] + draw.choice((flip_bit, put_magic))(draw, data), "a number"
    return damage(draw, content)


_META = (
    *(10, 12, 14, 16, 20, 24, 32, 40, 44, 46, 48, 56, 64, 72, 80, 88, 92, 94, 96, 104, 112),
    *(120, 128, 136, 144),
)  # places of the fields of an LMDB's meta page
_PAGE = (0, 8, 10, 12, 14, 16, 18, 20, 22)  # of those of any other page, and its first pointers


def damage_pages(draw: Random, content: bytes, page: int = 4096) -> tuple[bytes, str]:
    """An LMDB file with damage in headers, pointers and nodes, which stand at known places."""
    how = draw.choice(("meta", "page", "node", "exchange", "bytes"))
    pages = len(content) // page
    changed = bytearray(content)
    number = draw.choice(INTEGERS)
    width = draw.choice((2, 4, 8))
    field = (number % 2 ** (8 * width)).to_bytes(width, "little")
    small = draw.choice((0, 1, 2, 3, pages - 1, pages, 15, 16, 18, 4095, 4096)).to_bytes(
        2, "little"
    )
    new = draw.choice((field, small))
    if how == "meta":
        place = draw.choice(_META)
        for meta in (0, page) if draw.random() < 0.7 else (page,):
            changed[meta + place : meta + place + len(new)] = new
        return bytes(changed), f"meta at {place}: {new.hex()}"
    if how == "page" and pages > 2:
        place = page * draw.randrange(2, pages) + draw.choice(_PAGE)
        changed[place : place + len(new)] = new
        return bytes(changed), f"page {place // page} at {place % page}: {new.hex()}"
    if how == "node" and pages > 2:  # nodes fill a page from its end
        begin = page * draw.randrange(2, pages)
        lower, upper = struct.unpack("<HH", content[begin + 12 : begin + 16])
        if 16 < lower < upper < page:
            place = begin + draw.randrange(upper, page)
            changed[place : place + len(new)] = new
            return bytes(changed), f"node at {place}: {new.hex()}"
    if how == "exchange" and pages > 3:
        one, other = (page * number for number in draw.sample(range(pages), 2))
        a, b = content[one : one + page], content[other : other + page]
        changed[one : one + page], changed[other : other + page] = b, a
        return bytes(changed), f"pages {one // page} and {other // page} exchanged"
    return damage(draw, content)
