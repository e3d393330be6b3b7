"""Files appear complete or not at all."""

import os
import stat

import pytest

from molflt.files import atomically, write_atomically


def test_a_block_that_fails_leaves_the_older_file(tmp_path):
    path = tmp_path / "new" / "a.txt"
    write_atomically(path, b"old")
    with pytest.raises(ValueError, match="half"), atomically(path) as part:
        part.write_text("new")
        raise ValueError("half")
    assert path.read_bytes() == b"old" and os.listdir(path.parent) == ["a.txt"]
    with atomically(path) as part:
        part.unlink()  # some libraries write another file in its place, for its owner alone
        part.write_text("new")
        part.chmod(0o600)
    (path.parent / "plain.txt").touch()
    assert path.read_bytes() == b"new" and len(os.listdir(path.parent)) == 2
    assert stat.S_IMODE(path.stat().st_mode) == (path.parent / "plain.txt").stat().st_mode & 0o777


def test_what_cannot_be_written_is_named(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=r"folder: could not be written \(Is a directory\); the one"):
        write_atomically(tmp_path / "folder", b"")
    assert os.listdir(tmp_path) == ["folder"]
