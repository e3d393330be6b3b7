"""Pickles: damage between and inside of their opcodes, and programs that would run code."""

from __future__ import annotations

import contextlib
import pickle
import pickletools
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random

from fuzzing.mutate import INTEGERS, damage, magic

_LONE = b"().0]}lt12aesudbQR\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94N"  # need no argument


def split(content: bytes) -> list[bytes]:
    """A pickle as opcodes with their arguments; what cannot be read stands at the end."""
    places = [0]
    with contextlib.suppress(Exception):  # of a damaged pickle
        for _, _, place in pickletools.genops(content):
            places += [place] if place else []
    ends = [*places[1:], len(content)]
    return [content[a:b] for a, b in zip(places, ends, strict=True)]


def damage_pickle(draw: Random, content: bytes) -> tuple[bytes, str]:
    """A pickle with opcodes removed, repeated, exchanged, replaced, or with other arguments."""
    codes = split(content)
    how = draw.choice(("remove", "repeat", "exchange", "replace", "argument", "argument", "bytes"))
    if len(codes) < 4 or how == "bytes":
        return damage(draw, content)
    at, other = draw.randrange(len(codes)), draw.randrange(len(codes))
    if how == "remove":
        del codes[at]
    elif how == "repeat":
        codes[at:at] = codes[at : at + draw.randrange(1, 8)] * draw.choice((1, 2, 60))
    elif how == "exchange":
        codes[at], codes[other] = codes[other], codes[at]
    elif how == "replace":
        codes[at] = draw.choice((bytes([draw.choice(_LONE)]), number(draw), memo(draw)))
    else:
        codes[at] = _other_argument(draw, codes[at])
    return b"".join(codes), f"{how} opcode {at}"


def number(draw: Random) -> bytes:
    """Opcodes of a number, or of a name in quotes."""
    value: object = draw.choice(INTEGERS)
    value = draw.choice(
        (value, float(draw.choice((0, 1, -1))), float("nan"), "x" * 300, b"\0", True)
    )
    return pickle.dumps(value, 3)[2:-1]


def memo(draw: Random) -> bytes:
    """Puts or gets in a far place."""
    place = struct.pack("<I", draw.choice((0, 1, 255, 2**16, 0x0C000000, 2**32 - 1)))
    return draw.choice((b"r", b"j")) + place


def _other_argument(draw: Random, code: bytes) -> bytes:
    if len(code) < 2:
        return number(draw)
    changed = bytearray(code)
    new = magic(draw)
    at = draw.choice((1, draw.randrange(1, len(code))))
    changed[at : at + len(new)] = new
    return bytes(changed[: len(code)]) if draw.random() < 0.8 else bytes(changed)


def _text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def _name(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def programs(canary: Path) -> dict[str, bytes]:
    """Opcodes, by name, that would make the canary if they were executed and leave a value."""
    touch, make = f"touch {canary}", f"open({str(canary)!r}, 'w')"
    shell, run = _text(touch), _text(make)
    stacked = _text("posix") + _text("system") + b"\x93"
    dotted = _text("torch_geometric.data.data") + _text("Data.__init__.__globals__") + b"\x93"
    found = {
        "reduce os.system": _name("os", "system") + shell + b"\x85R",
        "reduce posix.system": _name("posix", "system") + shell + b"\x85R",
        "reduce eval": _name("builtins", "eval") + run + b"\x85R",
        "reduce exec": _name("builtins", "exec") + run + b"\x85R",
        "reduce exec of Python 2": _name("__builtin__", "eval") + run + b"\x85R",
        "reduce Popen": _name("subprocess", "Popen") + b"(" + _text("touch") + _text(str(canary))
        + b"l\x85R",
        "reduce ctypes": _name("ctypes", "CDLL") + _text("libc.so.6") + b"\x85R",
        "reduce import": _name("importlib", "import_module") + _text("antigravity") + b"\x85R",
        "reduce torch.load": _name("torch", "load") + _text(str(canary)) + b"\x85R",
        "reduce open": _name("io", "open") + _text(str(canary)) + _text("w") + b"\x86R",
        "inst": b"(" + shell + b"ios\nsystem\n",
        "obj": b"(" + _name("os", "system") + shell + b"o",
        "global alone": _name("os", "system"),
        "stack global": stacked + shell + b"\x85R",
        "stack global, dotted": dotted + b")R",
        "newobj": _name("subprocess", "Popen") + _text(touch) + b"\x85\x81",
        "newobj_ex": _name("subprocess", "Popen") + _text(touch) + b"\x85}\x92",
        "build": _name("torch_geometric.data.data", "Data") + b")\x81}" + _text("__setstate__")
        + _name("os", "system") + b"sb" + shell + b"b",
        "build of the class": _name("torch_geometric.data.data", "Data") + b"}"
        + _text("__reduce__") + _name("os", "system") + b"sb",
        "ext1": b"\x82\x01" + shell + b"\x85R",
        "ext2": b"\x83\x01\x01" + shell + b"\x85R",
        "ext4": b"\x84\x01\0\0\0" + shell + b"\x85R",
        "persid": b"P" + touch.encode() + b"\n",
        "binpersid": shell + b"Q",
        "object array": _name("numpy.core.multiarray", "_reconstruct")
        + _name("numpy", "ndarray") + b"K\0\x85" + b"C\x01b\x87R",
        "scalar of an object": _name("numpy.core.multiarray", "scalar") + _name("numpy", "dtype")
        + _text("O8") + b"\x85R" + _name("os", "system") + b"\x86R",
    }  # fmt: skip
    inner = b"\x80\x02" + found["reduce os.system"] + b"."
    storage = b"B" + struct.pack("<I", len(inner)) + inner
    found["nested in a storage"] = _name("torch.storage", "_load_from_bytes") + storage + b"\x85R"
    return found


def _nested(depth: int) -> bytes:
    return b")" + b"2\x86" * depth


BOMBS: dict[str, bytes] = {
    "hash of nested tuples": b"}(" + _nested(60) + b"K\x01u",
    "dtype of nested tuples": _name("numpy", "dtype") + _nested(60) + b"\x85R",
    "names of nested tuples": _nested(60) + _nested(60) + b"\x93",
    "class of nested tuples": _nested(60) + b")R",
    "far memo": b"Nr\0\0\0\x0c",
    "farthest memo": b"Nr\xff\xff\xff\xff",
    "far memo of text": b"Np4000000000\n",
    "long of 2^31 digits": b"\x8b\xff\xff\xff\x7f",
    "long in text": b"I" + b"9" * 60000 + b"\n",
    "bytes of 2^60": b"\x8e" + struct.pack("<Q", 2**60),
    "bytearray of 2^40": b"\x96" + struct.pack("<Q", 2**40),
    "frame of 2^62": b"\x95" + struct.pack("<Q", 2**62) + b"N",
    "list in itself": b"]q\x00h\x00a",
    "doubled lists": b"]" + b"2(h\x00h\x00e" * 3,
    "ten thousand lists": b"]" * 10000 + b"a" * 9999,
    "a dict that is its own state": _name("torch_geometric.data.data", "Data")
    + b")\x81q\x01h\x01b",
}


def wide_tensor(rows: int, write: Callable[[object], bytes]) -> bytes:
    """A record's field whose tensor repeats a row without holding it."""
    import torch

    return write(torch.zeros(1, 3).expand(rows, 3))
