"""Which paths another user could exchange. Each test builds its own little machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from daemon.system.private_path import UntrustedPathError, check_private_path

STRANGER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def refusal(path: Path, also_owner: int | None = None) -> str:
    """Why the path is not trusted; empty if it is."""
    try:
        check_private_path(path, also_owner)
    except UntrustedPathError as error:
        return str(error)
    return ""


@pytest.fixture
def shared(tmp_path) -> Path:
    """A directory like /tmp."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def mine(tmp_path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir(mode=0o700)
    return folder


def test_own_directories_are_trusted_whether_or_not_they_are_there(mine, shared):
    assert refusal(mine) == ""
    assert refusal(mine / "not" / "yet") == ""
    assert refusal(shared / "not" / "yet") == ""
    (shared / "deepinfer-1").mkdir(mode=0o755)
    assert refusal(shared / "deepinfer-1" / "default") == ""


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o702])
def test_a_directory_that_others_can_write_is_not(mine, mode):
    (mine / "run").mkdir()
    mine.chmod(mode)
    assert refusal(mine / "run") == f"{mine} can be written by other users"
    assert refusal(mine) == f"{mine} can be written by other users"


def test_a_shared_directory_is_no_run_directory_itself(shared):
    assert refusal(shared) == f"{shared} can be written by other users"


@as_root
def test_a_directory_that_a_group_of_others_can_write_is_not(mine):
    mine.chmod(0o770)
    assert refusal(mine / "run") == ""  # of the group of root
    os.chown(mine, -1, STRANGER)
    assert refusal(mine / "run") == f"{mine} can be written by other users"


def test_own_links_are_followed_on_the_way_but_not_at_the_end(mine, tmp_path):
    (tmp_path / "way").symlink_to("mine")
    (tmp_path / "absolute").symlink_to(tmp_path / "way")
    assert refusal(tmp_path / "way" / "run") == ""
    assert refusal(tmp_path / "absolute" / "run") == ""
    assert refusal(tmp_path / "way") == f"{tmp_path / 'way'} is a link"
    mine.chmod(0o777)
    assert refusal(tmp_path / "absolute" / "run") == f"{mine} can be written by other users"


def test_links_in_a_circle_end(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert "is a link" in refusal(tmp_path / "a" / "run")


def test_two_dots_lead_back_from_where_a_link_leads(mine, tmp_path):
    (mine / "below").mkdir()
    (tmp_path / "way").symlink_to("mine/below")
    mine.chmod(0o777)
    assert refusal(tmp_path / "way" / ".." / "x") == f"{mine} can be written by other users"


@as_root
def test_what_belongs_to_others_is_not_trusted(shared):
    theirs = shared / "deepinfer-0"
    theirs.mkdir(mode=0o755)
    os.chown(theirs, STRANGER, STRANGER)
    assert refusal(theirs / "default") == f"{theirs} belongs to user {STRANGER}"
    assert refusal(theirs) == f"{theirs} belongs to user {STRANGER}"
    assert refusal(theirs / "default", STRANGER) == ""


@as_root
def test_a_link_of_others_is_not_followed(mine, shared):
    (shared / "way").symlink_to(mine)
    os.lchown(shared / "way", STRANGER, STRANGER)
    assert refusal(shared / "way" / "run") == f"{shared / 'way'} belongs to user {STRANGER}"
