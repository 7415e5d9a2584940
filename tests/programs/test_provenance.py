"""Where a fragment comes from stands in its header, and the commit is that of the checkout."""

import subprocess
from pathlib import Path

import pytest

import clawq
from clawq.programs.provenance import commit_of, provenance


def git(folder: Path, *words: str) -> str:
    named = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *named, *words], cwd=folder, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "a.txt").write_text("a")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "one")
    return folder


def test_the_commit_is_what_git_says(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    assert commit_of(checkout) == commit[:12]
    # Packed, on another branch, detached, and in a worktree
    git(checkout, "pack-refs", "--all")
    assert commit_of(checkout) == commit[:12]
    git(checkout, "checkout", "-q", "--detach")
    assert commit_of(checkout) == commit[:12]
    git(checkout, "worktree", "add", "-q", "-b", "side/way", "../tree")
    (checkout.parent / "tree" / "b.txt").write_text("b")
    git(checkout.parent / "tree", "add", ".")
    git(checkout.parent / "tree", "commit", "-q", "-m", "two")
    assert commit_of(checkout.parent / "tree") == git(checkout.parent / "tree", "rev-parse", "HEAD")[:12] != commit[:12]


def test_what_is_no_checkout_has_no_commit(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == ""
    (tmp_path / ".git").mkdir()
    assert commit_of(tmp_path) == ""
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/none\n")
    assert commit_of(tmp_path) == ""
    (tmp_path / ".git" / "HEAD").write_bytes(b"\xff\xfe")
    assert commit_of(tmp_path) == ""


def test_everything_is_bounded() -> None:
    made_by = provenance("x" * 1000)
    assert len(made_by.env) == 100
    assert made_by.version == clawq.__version__
