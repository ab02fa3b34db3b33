"""The daemon's API keys: what is a key in a file, and what a reload does."""

from __future__ import annotations

import pytest

from daemon.errors import ConfigurationError
from daemon.instance.key_ring import KeyRing
from transport.messages.from_daemon import ApiKeys, InstanceStatus


def test_keys_file(tmp_path):
    assert KeyRing(None, None).keys == ApiKeys()
    with pytest.raises(ConfigurationError, match=r"cannot be read .*--api-keys-file\.$"):
        KeyRing(tmp_path / "none", None)
    with pytest.raises(ConfigurationError, match=r"cannot be read .*--admin-keys-file\.$"):
        KeyRing(None, tmp_path / "none")
    path = tmp_path / "keys"
    path.write_text("# none yet\n\n")
    with pytest.raises(ConfigurationError, match=r"holds no key: .*--api-keys-file out\.$"):
        KeyRing(path, None)
    path.write_text("# ours\nsecret\n")
    assert KeyRing(path, path).keys == ApiKeys((b"secret",), (b"secret",))


def test_what_an_editor_adds_is_no_part_of_a_key(tmp_path):
    path = tmp_path / "keys"
    path.write_bytes(
        b"\xef\xbb\xbfone\r\n\r\n  \r\n# note\r\n \xef\xbb\xbf\r\n\xef\xbb\xbf# note\r\n\xef\xbb\xbftwo \r\n"
    )
    assert KeyRing(path, None).keys.users == (b"one", b"two")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_a_file_that_is_no_plain_text_is_named(tmp_path, encoding):
    path = tmp_path / "keys"
    path.write_text("secret\n", encoding=encoding)
    with pytest.raises(ConfigurationError, match=r"no request can send.*UTF-8.*--api-keys-file\.$"):
        KeyRing(path, None)


def test_a_reload_takes_both_files_or_none(tmp_path, monkeypatch):
    users, admins = tmp_path / "users", tmp_path / "admins"
    users.write_text("u1\n")
    admins.write_text("a1\n")
    monkeypatch.chdir(tmp_path)
    ring = KeyRing(users.relative_to(tmp_path), admins)
    monkeypatch.chdir("/")
    before = ring.keys

    users.write_text("u2\n")
    admins.unlink()
    with pytest.raises(ConfigurationError, match="admins cannot be read"):
        ring.reload()
    assert ring.keys is before
    admins.write_text("\n")
    with pytest.raises(ConfigurationError, match="admins holds no key"):
        ring.reload()
    assert ring.keys is before

    admins.write_text("a2\n")
    ring.reload()
    assert ring.keys == ApiKeys((b"u2",), (b"a2",))


def test_keys_do_not_get_into_a_log():
    assert "secret" not in repr(InstanceStatus("ready", keys=ApiKeys((b"secret",), (b"secret",))))
