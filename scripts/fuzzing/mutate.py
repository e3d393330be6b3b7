"""Damage that knows nothing of a format."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from random import Random

INTEGERS = (
    *(0, 1, -1, 2, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1),
    *(2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1),
)
FLOATS = (0.0, -0.0, math.nan, math.inf, -math.inf, 1e300, -1e300, 1e38, 1e-45, 5e-324, 0.5, 1e6)


def magic(draw: Random) -> bytes:
    """A number at which programs err, in one of its binary forms."""
    if draw.random() < 0.3:
        return struct.pack(draw.choice("<>") + draw.choice("fd"), _single(draw.choice(FLOATS)))
    width = draw.choice((1, 2, 4, 8))
    value = draw.choice(INTEGERS) & ((1 << 8 * width) - 1)
    return value.to_bytes(width, draw.choice(("little", "big")))


def _single(value: float) -> float:
    """A number that fits into four bytes, too."""
    return value if not math.isfinite(value) or abs(value) < 3e38 else math.copysign(3e38, value)


def _span(draw: Random, content: bytes) -> tuple[int, int]:
    """A piece, mostly short; more often near the beginning, where headers are."""
    begin = draw.randrange(len(content) + 1)
    if draw.random() < 0.4:
        begin = min(begin, draw.randrange(256))
    longest = draw.choice((1, 4, 16, 64, 1024))
    return begin, min(len(content), begin + 1 + draw.randrange(longest))


def flip_bit(draw: Random, content: bytes) -> bytes:
    changed = bytearray(content)
    changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def fill(draw: Random, content: bytes) -> bytes:
    begin, end = _span(draw, content)
    noise = draw.randbytes(end - begin)
    filled = draw.choice((b"\0" * len(noise), b"\xff" * len(noise), noise, b" " * len(noise)))
    return content[:begin] + filled + content[end:]


def truncate(draw: Random, content: bytes) -> bytes:
    return content[: draw.choice((0, 1, draw.randrange(len(content)), len(content) - 1))]


def insert(draw: Random, content: bytes) -> bytes:
    begin, end = _span(draw, content)
    return content[:begin] + draw.randbytes(end - begin) + content[begin:]


def remove(draw: Random, content: bytes) -> bytes:
    begin, end = _span(draw, content)
    return content[:begin] + content[end:]


def repeat(draw: Random, content: bytes) -> bytes:
    begin, end = _span(draw, content)
    return content[:end] + content[begin:end] * draw.choice((1, 2, 50)) + content[end:]


def exchange(draw: Random, content: bytes) -> bytes:
    (a, b), (c, d) = sorted((_span(draw, content), _span(draw, content)))
    if b > c:
        return flip_bit(draw, content)
    return content[:a] + content[c:d] + content[b:c] + content[a:b] + content[d:]


def put_magic(draw: Random, content: bytes) -> bytes:
    number = magic(draw)
    begin, _ = _span(draw, content)
    begin -= begin % len(number) if draw.random() < 0.7 else 0  # fields are mostly aligned
    return content[:begin] + number + content[begin + len(number) :]


MUTATIONS: tuple[Callable[[Random, bytes], bytes], ...] = (
    flip_bit, fill, truncate, insert, remove, repeat, exchange, put_magic, put_magic
)  # fmt: skip


def damage(draw: Random, content: bytes) -> tuple[bytes, str]:
    """Content with one to four pieces of damage, and their names; never the content itself."""
    names: list[str] = []
    changed = content
    while changed == content or (changed and len(names) < 4 and draw.random() < 0.4):
        mutation = draw.choice(MUTATIONS) if changed else insert
        changed = mutation(draw, changed) if changed else draw.randbytes(8)
        names.append(mutation.__name__)
    return changed, " ".join(names)
