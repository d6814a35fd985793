"""The link between a rank's wrapper and bagua-run, over TCP as between hosts."""

import os
import subprocess
import sys

import pytest

from bagua.common.errors import UsageError
from bagua.launch import rank
from bagua.launch.channel import KILL, TERMINATE, Exit, Link, Listener, interface_addresses


@pytest.fixture
def listener():
    listener = Listener(remote=True, interfaces="lo")
    yield listener
    listener.close()


def wrapped(listener, program, **variables):
    """A wrapper as mpirun would start it on another host, and its link."""
    process = subprocess.Popen(
        [sys.executable, "-IS", rank.__file__, sys.executable, "-c", program],
        env={**os.environ, **listener.variables, **{"PMI_RANK": "5", **variables}},
    )
    listener.sock.settimeout(30)
    link = Link(listener.sock.accept()[0])
    link.sock.settimeout(30)
    return process, link


def frames_until_exit(link):
    frames = []
    while not frames or frames[-1][0] != b"X":
        frames += link.frames()
    return frames


def test_output_and_exit_travel_over_tcp(listener):
    process, link = wrapped(listener, "import sys; print('hi', flush=True); sys.exit(4)")
    (_, hello), *output, (_, end) = frames_until_exit(link)
    assert link.greet(hello, listener.token)
    assert link.rank == 5
    assert b"".join(payload for kind, payload in output if kind == b"O") == b"hi\n"
    assert link.note_exit(end) == Exit(5, link.host, code=4)
    link.sock.close()
    assert process.wait(30) == 4


def test_an_order_to_stop_is_noted(listener):
    process, link = wrapped(listener, "import time; print('up', flush=True); time.sleep(100)")
    frames = []
    while not frames or frames[-1][0] != b"O":
        frames += link.frames()
    link.order(TERMINATE)
    end = frames_until_exit(link)[-1][1]
    assert end == b"signal 15 1"
    link.sock.close()
    assert process.wait(30) == 128 + 15


def test_an_end_because_of_another_rank_is_reported(listener):
    program = (
        "import os; os.write(int(os.environ['BAGUA_RUN_VERDICT_FD'].split(':')[0]), b'peer'); "
        "os._exit(1)"
    )
    process, link = wrapped(listener, program)
    (_, hello), *_, (_, end) = frames_until_exit(link)
    assert link.greet(hello, listener.token)
    assert link.note_exit(end) == Exit(5, link.host, code=1, peer=True)
    link.sock.close()
    assert process.wait(30) == 1


def test_rank_0_asks_for_input_piece_by_piece(listener):
    program = "import sys; print(len(sys.stdin.buffer.read()))"
    process, link = wrapped(listener, program, PMI_RANK="0")
    pieces = [b"x" * 200_000, b"y" * 200_000, b""]  # more than a pipe holds
    output = b""
    ended = False
    while not ended:
        for kind, payload in link.frames():
            if kind == b"R":
                link.send(b"S", pieces.pop(0))
            output += payload if kind == b"O" else b""
            ended = kind == b"X"
    assert (pieces, output) == ([], b"400000\n")
    link.sock.close()
    assert process.wait(30) == 0


def test_an_order_passes_input_that_is_not_taken(listener):
    process, link = wrapped(listener, "import time; time.sleep(100)", PMI_RANK="0")
    while b"R" not in [kind for kind, _ in link.frames()]:
        pass
    link.send(b"S", b"x" * 1_000_000)
    link.order(KILL)
    assert frames_until_exit(link)[-1][1] == b"signal 9 1"
    link.sock.close()
    assert process.wait(30) == 128 + 9


def test_a_lost_link_kills_the_program(listener):
    process, link = wrapped(listener, "import time; time.sleep(100)")
    link.sock.close()
    assert process.wait(30) == 128 + 9


def test_a_stranger_is_not_greeted(listener):
    process, link = wrapped(listener, "pass", BAGUA_RUN_TOKEN="guessed")
    hello = frames_until_exit(link)[0][1]
    assert not link.greet(hello, listener.token)
    link.sock.close()
    assert process.wait(30) == 0


def test_only_a_present_interface_is_taken():
    assert interface_addresses("lo") == ["127.0.0.1"]
    with pytest.raises(UsageError, match="no interface 'loo' here"):
        interface_addresses("loo")
