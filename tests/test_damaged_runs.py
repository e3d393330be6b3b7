"""Damaged files of runs are refused in one line that names the file."""

import numpy as np
import torch
from tiny_run import error_of

from molflt.commands.cli import main
from molflt.training.checkpoint import read_checkpoint


def refused(path, read) -> bool:
    """Returns False if the file was read; the message must be one short line."""
    try:
        read()
    except (ValueError, FileNotFoundError) as error:
        text = str(error)
        assert text.startswith(str(path)) and "\n" not in text, text
        return True
    return False


def test_damaged_checkpoints_are_refused(copied_run):
    """Wherever a tensor or the structure of the file is damaged; padding may change."""
    path = copied_run / "checkpoints" / "last.ckpt"
    whole, sound = path.read_bytes(), read_checkpoint(path)["state_dict"]
    places = np.random.default_rng(0).integers(len(whole), size=60)
    count = 0
    for place in places:
        content = bytearray(whole)
        content[place] ^= 1
        path.write_bytes(content)
        count += refused(path, lambda: read_checkpoint(path))
    assert count > 30
    storage = next(t for name, t in sound.items() if name.endswith("mlp.0.weight"))
    at = whole.index(storage.numpy().tobytes())
    path.write_bytes(whole[: at + 9] + bytes([whole[at + 9] ^ 1]) + whole[at + 10 :])
    assert refused(path, lambda: read_checkpoint(path))
    for end in (0, 1, 100, 5_000, len(whole) - 71, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert refused(path, lambda: read_checkpoint(path))


def test_a_checkpoint_of_an_earlier_version_with_a_digest_resumes(copied_run, capsys):
    """Version 0.1 appended sha256 as the comment of the zip archive."""
    path = copied_run / "checkpoints" / "last.ckpt"
    comment = b"sha256:" + b"0" * 64
    path.write_bytes(path.read_bytes()[:-2] + len(comment).to_bytes(2, "little") + comment)
    assert torch.load(path, weights_only=True)["global_step"] == 8
    assert main(["train", "--resume", str(copied_run), "--trainer.max_steps", "9"]) == 0
    (copied_run / "metrics.csv").write_bytes(b"step\xff\n")
    assert "metrics.csv" in error_of(
        capsys, "train", f"--resume={copied_run}", "--trainer.max_steps=10"
    )
