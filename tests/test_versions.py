"""The commit in versions.json is that of molflt's own repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from molflt.training.run_folder import _git_commit

OURS = '[project]\nname = "molflt"\n'


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


def test_the_commit_is_of_molflts_own_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    commit = repository(own)
    foreign = repository(other)
    (own / "pyproject.toml").write_text(OURS)
    assert _git_commit(own) == commit != foreign
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))  # as in a hook of another repository
    assert _git_commit(own) == commit


@pytest.mark.parametrize(
    ("where", "project"),
    [
        ("venv/lib/python3/site-packages", None),
        ("vendored/molflt", OURS),
        (".", '[project]\nname = "another"\n'),
        (".", "[tool.x]\n"),
        (".", "project = 3\n"),
        (".", "[[["),
    ],
)
def test_no_commit_of_another_repository(tmp_path: Path, where: str, project: str | None) -> None:
    repository(tmp_path)
    root = tmp_path / where
    root.mkdir(parents=True, exist_ok=True)
    if project is not None:
        (root / "pyproject.toml").write_text(project)
    assert _git_commit(root) is None


def test_no_commit_without_a_repository_or_without_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text(OURS)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert _git_commit(tmp_path) is None
    repository(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert _git_commit(tmp_path) is None
