"""Where this process's fragments come from: host, environment, version of clawq, commit of its checkout.

Found out once for each process and written into every header (some hundred bytes of some hundred thousand). The commit
is read from the files in `.git`: there need be no git on the machine, no process is started, and a checkout of another
user is no obstacle. Whether the checkout has changes that are not committed is not looked at.
"""

import re
import socket
from functools import cache
from pathlib import Path

import clawq
from clawq.types import Provenance

#: Longest text; names of hosts and environments are shorter.
_MOST_CHARACTERS = 100
#: Digits of a commit that are kept.
_DIGITS = 12
_COMMIT = re.compile(r"[0-9a-f]{40,64}")


@cache
def provenance(env: str) -> Provenance:
    """What fragments of that environment (its spec's name) say of their origin."""
    checkout = Path(clawq.__file__).resolve().parents[1]
    return Provenance(_short(socket.gethostname()), _short(env), clawq.__version__, commit_of(checkout))


def commit_of(checkout: Path) -> str:
    """The first digits of the commit that is checked out there; "" if it is no git checkout, or cannot be read."""
    try:
        git = checkout / ".git"
        if git.is_file():
            # A worktree or submodule: the file names the real folder.
            git = (checkout / git.read_text().partition("gitdir:")[2].strip()).resolve()
        head = (git / "HEAD").read_text().strip()
        named = head.partition("ref: ")[2]
        commit = _resolve(git, named) if named else head
    except (OSError, ValueError):
        return ""
    return commit[:_DIGITS] if _COMMIT.fullmatch(commit) else ""


def _resolve(git: Path, name: str) -> str:
    """The commit of a reference: in a file of its own, or in the packed ones."""
    shared = git / "commondir"
    common = (git / shared.read_text().strip()).resolve() if shared.is_file() else git
    for folder in (git, common):
        if (folder / name).is_file():
            return (folder / name).read_text().strip()
    for line in (common / "packed-refs").read_text().splitlines():
        commit, _, reference = line.partition(" ")
        if reference == name:
            return commit
    return ""


def _short(text: str) -> str:
    return text[:_MOST_CHARACTERS]
