"""Host lists in the forms people write."""

import socket

import pytest

from bagua.common.errors import UsageError
from bagua.launch.hosts import Host, parse_hosts, read_hostfile


def test_host_list():
    assert parse_hosts("h1:2,h2,[fe80::1]:3, h1:1") == [
        Host("h1", 3),
        Host("h2", 1),
        Host("fe80::1", 3),
    ]


@pytest.mark.parametrize("text", ["", "h1:0", "h1:x", "h1:2:3", ":2"])
def test_bad_host_list(text):
    with pytest.raises(UsageError, match="-H"):
        parse_hosts(text)


def test_hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# ours\nh1 slots=2\n\nh2:3  # the big one\nh3\nh4 slots=1 max_slots=4\n")
    assert read_hostfile(str(path)) == [Host("h1", 2), Host("h2", 3), Host("h3", 1), Host("h4", 1)]


def test_bad_hostfile_names_the_line(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("h1\nh2 slotz=3\n")
    with pytest.raises(UsageError, match="line 2"):
        read_hostfile(str(path))
    with pytest.raises(UsageError, match="No such file"):
        read_hostfile(str(tmp_path / "none"))
    path.write_bytes(b"h1\nh\xfc2\n")
    with pytest.raises(UsageError, match="not text in UTF-8, at byte 4"):
        read_hostfile(str(path))


def test_which_hosts_are_local():
    assert Host("localhost").is_local
    assert Host(socket.gethostname()).is_local
    assert not Host("some.other.host").is_local
