"""Whether a path can be trusted on a machine with several users."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path
from typing import Final

MAX_LINKS: Final = 40
ROOT_GROUP: Final = 0


class UntrustedPathError(Exception):
    """Another user can exchange what is at a path. The text has no capital and no full stop."""


def check_private_path(path: Path, also_owner: int | None = None) -> None:
    """Whether nobody but root, this user and `also_owner` can exchange what is at `path`.

    Each directory on the way must belong to one of them and be writable to no other, unless it is
    sticky like /tmp. Links of others are not followed, and no link at all at the end. What does not exist
    yet is fine. Afterwards the path can be used by its name: nobody else can change where it leads.

    Raises:
        UntrustedPathError: the path can be exchanged, or its end is a link.
        OSError: it cannot be looked at.
    """
    # The owner of / is root, also where a user namespace shows root under another number.
    owners = {0, os.geteuid(), Path("/").lstat().st_uid, also_owner}
    here, names, links = Path("/"), list(reversed(path.parts[1:])), 0
    while names:
        name = names.pop()
        if name == "..":
            here = here.parent
            continue
        entry = here / name
        try:
            found = entry.lstat()
        except FileNotFoundError:
            return
        if found.st_uid not in owners:
            raise UntrustedPathError(f"{entry} belongs to user {found.st_uid}")
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if not names or links > MAX_LINKS:
                raise UntrustedPathError(f"{entry} is a link")
            target = entry.readlink()
            here = Path("/") if target.is_absolute() else here
            names += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            continue
        is_sticky = bool(found.st_mode & stat.S_ISVTX)
        if _is_writable_to_others(found) and not (is_sticky and names):
            raise UntrustedPathError(f"{entry} can be written by other users")
        here = entry


def _is_writable_to_others(found: os.stat_result) -> bool:
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _is_own_group(found.st_gid)


def _is_own_group(gid: int) -> bool:
    """Root's group, or one that has this user as its only member, as many systems make for each."""
    if gid == ROOT_GROUP:
        return True
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    is_users = (user.pw_gid, user.pw_name) == (gid, group.gr_name)
    return is_users and set(group.gr_mem) <= {user.pw_name}
