"""Reading LMDB files: what the library reads, and no crash, whatever a page says."""

from __future__ import annotations

import random
import struct

import lmdb
import pytest

from molflt.data.structures.lmdb_file import LmdbFile

PAGE = 4096
BRANCH, LEAF = 1, 2


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A file with two levels of pages, values in nodes, on one page and on several."""
    path = tmp_path_factory.mktemp("lmdb") / "data.lmdb"
    draw = random.Random(0)
    content = {b"length": b"400", b"\xff" * 511: b""}
    content |= {b"%d" % i: draw.randbytes((0, 30, 1500, 9000)[i % 4]) for i in range(400)}
    with lmdb.open(str(path), subdir=False, map_size=1 << 26, lock=False) as environment:
        for part in range(4):  # each transaction leaves old pages behind
            with environment.begin(write=True) as transaction:
                for key in list(content)[part::4]:
                    transaction.put(key, content[key])
        with environment.begin(write=True) as transaction:
            for i in range(0, 400, 7):
                transaction.delete(b"%d" % i)
                del content[b"%d" % i]
    return path, content


def test_everything_is_read_as_by_the_library(written):
    path, content = written
    file = LmdbFile(path)
    assert list(file) == sorted(content) and len(file) == len(content)
    assert all(file.get(key) == value for key, value in content.items())
    assert not any(file.get(key) for key in (b"", b"0", b"4000", b"zzz", b"\xff" * 512))


def test_file_without_keys(tmp_path):
    path = tmp_path / "empty.lmdb"
    lmdb.open(str(path), subdir=False, map_size=1 << 20, lock=False).close()
    assert len(LmdbFile(path)) == 0 and list(LmdbFile(path)) == []
    assert LmdbFile(path).get(b"0") is None


def pages_of(content, kind):
    starts = range(0, len(content), PAGE)
    return [at for at in starts if struct.unpack_from("<H", content, at + 10)[0] == kind]


def first_node(content, page):
    return page + struct.unpack_from("<H", content, page + 16)[0]


# What a page of keys says, and how: where in the page, what is written there.
LIES = {
    "flags": (LEAF, lambda c, p: (p + 10, "<H", 8)),
    "no nodes": (BRANCH, lambda c, p: (p + 12, "<H", 16)),
    "node beyond the page": (LEAF, lambda c, p: (p + 16, "<H", 65000)),
    "child is itself": (BRANCH, lambda c, p: (first_node(c, p), "<HHH", p // PAGE, 0, 0)),
}


@pytest.mark.parametrize(("kind", "lie"), LIES.values(), ids=LIES)
def test_pages_that_lie(written, tmp_path, kind, lie):
    content = bytearray(written[0].read_bytes())
    for page in pages_of(content, kind):
        at, form, *numbers = lie(content, page)
        struct.pack_into(form, content, at, *numbers)
    path = tmp_path / "lies.lmdb"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"lies\.lmdb: the LMDB is damaged: .*page") as caught:
        list(LmdbFile(path))
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"lies\.lmdb: key '1': the LMDB is damaged"):
        for key in (b"1", b"399", b"99"):
            LmdbFile(path).get(key)
