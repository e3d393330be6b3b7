import os
import resource
import stat

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open

from molflt.files import append, atomically, save_tensors, verify_tensors, warn, write_atomically


def test_a_block_that_fails_leaves_the_older_file(tmp_path):
    path = tmp_path / "new" / "a.txt"
    write_atomically(path, b"old")
    with pytest.raises(ValueError, match="half"), atomically(path) as part:
        part.write_text("new")
        raise ValueError("half")
    assert path.read_bytes() == b"old" and os.listdir(path.parent) == ["a.txt"]
    with atomically(path) as part:
        part.unlink()  # some libraries replace it with a file that only its owner can read
        part.write_text("new")
        part.chmod(0o600)
    (path.parent / "plain.txt").touch()
    assert path.read_bytes() == b"new" and len(os.listdir(path.parent)) == 2
    assert stat.S_IMODE(path.stat().st_mode) == (path.parent / "plain.txt").stat().st_mode & 0o777


def test_only_the_first_process_of_a_machine_warns(monkeypatch, capsys):
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        warn(f"seen by {rank}")
    assert capsys.readouterr().err == "molflt: warning: seen by 0\n"


def test_appending_is_atomic(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a\n")
    append(path, "b\n")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        with pytest.raises(OSError, match=r"a\.txt: could not be written .*; its content is kept"):
            append(path, "c" * 200)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_text() == "a\nb\n"


def test_a_full_disk_is_named_for_tensors(tmp_path, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(OSError, match="No space left on device.*free some space"):
        save_tensors(tmp_path / "a.safetensors", {"x": np.zeros(3)}, {})


def test_every_byte_of_tensors_is_guarded_by_their_digest(tmp_path):
    """A file with a changed byte, even in its header, is refused or has no digest."""
    path = tmp_path / "a.safetensors"
    arrays = {"b": np.arange(5, dtype="<f4"), "a": np.array([True, False])}
    save_tensors(path, arrays, {"step": "3", "note": 'é "quoted"\n'})
    assert verify_tensors(path)
    with safe_open(path, framework="np") as file:
        assert file.metadata()["note"] == 'é "quoted"\n'
        np.testing.assert_array_equal(file.get_tensor("b"), arrays["b"])
    content, passed = path.read_bytes(), 0
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        try:
            assert not verify_tensors(path)
            passed += 1
        except ValueError as error:
            assert str(path) in str(error) and len(str(error)) < len(str(path)) + 250
    assert passed == len("sha256")  # the name of the digest was changed
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        verify_tensors(path)
