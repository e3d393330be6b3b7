"""The commit in versions.json is that of molflt's own repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

from molflt.training.run_folder import _git_commit


def repository(folder: Path) -> str:
    """Creates a repository with one commit, and returns the commit."""

    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(folder), *identity, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    folder.mkdir(parents=True, exist_ok=True)
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", folder.name)
    return git("rev-parse", "HEAD")


def test_the_commit_is_of_the_repository_of_the_package(tmp_path, monkeypatch) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    commit, _ = repository(own), repository(other)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))  # as in a hook of another repository
    assert _git_commit(own) == commit
    assert _git_commit(own / "venv") is None
    monkeypatch.setenv("PATH", "")
    assert _git_commit(own) is None
