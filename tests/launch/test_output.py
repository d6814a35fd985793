"""What stands on the screen after ranks have written whole lines, pieces and progress bars."""

import os

import pytest

from bagua.launch import output
from bagua.launch.output import STDERR, STDOUT, Output, Screen
from bagua.launch.tracebacks import Tracebacks


class Written:
    """Screens over a pipe, and what has been written to them."""

    def __init__(self, is_tty=False, rank_count=2, **options):
        self._read, write = os.pipe()
        os.set_blocking(self._read, False)
        self.screen = Screen(write, is_tty, colour=False)
        screens = {STDOUT: self.screen, STDERR: self.screen}
        self.output = Output(rank_count, screens, **options)

    def feed(self, rank, data, name=STDOUT):
        self.output.feed(rank, name, data)

    def take(self):
        try:
            return os.read(self._read, 1 << 16)
        except BlockingIOError:
            return b""


def test_pieces_become_whole_lines():
    written = Written()
    written.feed(0, b"one ")
    written.feed(1, b"two\nthr")
    written.feed(0, b"line\n")
    written.feed(1, b"ee\n\n")
    assert written.take() == b"[1] two\n[0] one line\n[1] three\n[1] \n"


def test_ranks_are_aligned():
    written = Written(rank_count=11)
    written.feed(3, b"x\n")
    written.feed(10, b"y\n")
    assert written.take() == b"[3]  x\n[10] y\n"


def test_a_progress_bar_keeps_its_carriage_returns_in_a_log():
    written = Written()
    written.feed(0, b"\r10%")
    written.feed(0, b"\r20%")
    written.feed(0, b"\r20%\n")
    assert written.take() == b"[0] 10%\r[0] 20%\n"


def test_a_whole_line_ends_a_bar_in_a_log():
    written = Written()
    written.feed(0, b"\r10%")
    written.feed(1, b"hello\n")
    written.feed(0, b"\r20%")
    assert written.take() == b"[0] 10%\n[1] hello\n[0] 20%"


def test_a_whole_line_goes_above_a_bar_on_a_terminal():
    written = Written(is_tty=True)
    written.feed(0, b"\r10%")
    written.feed(1, b"hello\n")
    written.feed(0, b"\r20%")
    assert written.take() == b"[0] 10%\r\x1b[K[1] hello\n[0] 10%\r\x1b[K[0] 20%"


def test_a_lower_rank_takes_the_live_line():
    written = Written(is_tty=True)
    written.feed(1, b"\rb1")
    written.feed(0, b"\ra1")
    written.feed(1, b"\rb2")
    assert written.take() == b"[1] b1\r\x1b[K[0] a1"


def test_a_prompt_shows_after_a_moment_and_goes_on():
    written = Written()
    written.feed(0, b"name> ")
    assert written.take() == b""
    while written.output.show_waiting():
        pass
    assert written.take() == b"[0] name> "
    written.feed(0, b"bob\n")
    assert written.take() == b"bob\n"


@pytest.mark.parametrize("is_tty", [False, True])
def test_a_log_has_the_patience_for_the_end_of_a_line(monkeypatch, is_tty):
    """A rank that is slow to write it, beside one whose line comes between."""
    now = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    written = Written(is_tty)
    written.feed(0, b"7")
    now[0] = 0.5
    assert written.output.show_waiting() != is_tty
    written.feed(1, b"7\n")
    written.feed(0, b"\n")
    assert is_tty or written.take() == b"[1] 7\n[0] 7\n"


def test_unfinished_lines_end_with_the_job():
    written = Written()
    written.feed(0, b"no newline")
    written.output.end()
    assert written.take() == b"[0] no newline\n"


def test_timestamps():
    written = Written(timestamp=True)
    written.feed(0, b"x\n")
    day, clock, rest = written.take().split(b" ", 2)
    assert (len(day), len(clock), rest) == (10, 12, b"[0] x\n")


def test_files_hold_what_a_rank_wrote(tmp_path):
    written = Written(folder=str(tmp_path))
    written.feed(1, b"\r1%\r2%\n")
    written.feed(1, b"oh\n", STDERR)
    written.output.end()
    assert (tmp_path / "rank.1" / "stdout").read_bytes() == b"\r1%\r2%\n"
    assert (tmp_path / "rank.1" / "stderr").read_bytes() == b"oh\n"


def test_files_of_all_ranks_are_there_and_no_others(tmp_path):
    for name in ("rank.1/stdout", "rank.2/stderr", "rank.7/stdout", "rank.8/stdout", "rank.8/mine",
                 "rank.09/stdout", "rank.x/stdout", "ranks/stdout", "log"):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("old")
    (tmp_path / "rank.5").symlink_to(tmp_path / "ranks")
    Written(folder=str(tmp_path)).output.end()
    files = {
        str(p.relative_to(tmp_path)): p.read_text() for p in tmp_path.rglob("*") if p.is_file()
    }
    assert {name for name, text in files.items() if not text} == {
        f"rank.{rank}/{name}" for rank in (0, 1) for name in ("stdout", "stderr")
    }
    assert {name for name, text in files.items() if text} == {
        "rank.8/stdout", "rank.8/mine", "rank.09/stdout", "rank.x/stdout", "ranks/stdout", "log"
    }  # fmt: skip
    assert (tmp_path / "rank.5").is_symlink()
    assert not (tmp_path / "rank.2").exists()


def test_the_tail_is_shown_unless_it_stands_there_already():
    written = Written()
    for number in range(40):
        written.feed(1, b"line %d\n" % number)
    written.take()
    written.output.show_tail(1)
    assert written.take() == b""
    written.feed(0, b"other\n")
    written.take()
    written.output.show_tail(1)
    lines = written.take().decode().splitlines()
    assert lines[0] == "bagua-run: the last output of rank 1:"
    assert lines[1:] == [f"[1] line {number}" for number in range(10, 40)]


def test_what_went_to_another_screen_is_not_in_sight():
    written, elsewhere = Written(), Written()
    output = Output(2, {STDOUT: elsewhere.screen, STDERR: written.screen})
    output.feed(1, STDERR, b"a warning\n")
    output.show_tail(1)
    output.feed(1, STDOUT, b"the end\n")
    assert written.take() == b"[1] a warning\n"
    output.show_tail(1)
    said = b"bagua-run: the last output of rank 1:\n"
    assert written.take() == said + b"[1] a warning\n[1] the end\n"


def test_an_error_of_all_ranks_is_shown_once():
    written = Written(rank_count=10)
    for rank in range(7):
        written.feed(rank, FRAMES + b"ValueError: of all\n", STDERR)
        written.take()
        for told in {0, rank}:
            written.output.show_tail(told)
            assert written.take() == b"", "its frames are near"
    for rank in range(7, 10):
        written.feed(rank, FRAMES + b"ValueError: of all\n", STDERR)
    written.take()
    written.output.show_tail(0)
    assert written.take().startswith(b"bagua-run: the last output of rank 0:\n[0] Traceback")


def test_a_reader_that_left_is_an_error():
    read, write = os.pipe()
    os.close(read)
    screen = Screen(write, False, colour=False)
    with pytest.raises(BrokenPipeError):
        Output(1, {STDOUT: screen, STDERR: screen}).feed(0, STDOUT, b"x\n")


FRAMES = b'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    f()\n'


def test_a_traceback_of_all_ranks_is_shown_once():
    written = Written(rank_count=3)
    for rank in (1, 0, 2):
        written.feed(rank, FRAMES + b"ValueError: of rank %d\nand more\n" % rank, STDERR)
    shown = [*FRAMES.splitlines(), b"ValueError: of rank 1", b"and more"]
    expected = [b"[1] " + line for line in shown]
    for rank in (0, 2):
        expected.append(b"[%d] Traceback: the same as rank 1's" % rank)
        expected += [b"[%d] ValueError: of rank %d" % (rank, rank), b"[%d] and more" % rank]
    assert written.take().splitlines() == expected
    written.output.show_tail(0)
    said = b"bagua-run: the last output of rank 0:"
    tail = [*FRAMES.splitlines(), b"ValueError: of rank 0", b"and more"]
    assert written.take().splitlines() == [said, *(b"[0] " + line for line in tail)]


def test_tracebacks_that_differ_are_all_shown():
    written = Written()
    other = FRAMES.replace(b"line 3", b"line 4")
    written.feed(0, FRAMES + b"KeyError: 1\n", STDERR)
    written.feed(1, other + b"KeyError: 1\n", STDERR)
    written.feed(0, FRAMES + b"KeyError: 2\n", STDERR)  # its own, once more
    shown = [
        (0, FRAMES + b"KeyError: 1"),
        (1, other + b"KeyError: 1"),
        (0, FRAMES + b"KeyError: 2"),
    ]
    expected = [b"[%d] " % rank + line for rank, text in shown for line in text.splitlines()]
    assert written.take().splitlines() == expected


def test_a_traceback_of_long_ago_is_shown_again():
    now = 0.0
    tracebacks = Tracebacks(lambda: now)
    frames = FRAMES.splitlines()
    assert tracebacks.shorten(0, frames) == frames
    now = 20
    assert tracebacks.shorten(1, frames) == [b"Traceback: the same as rank 0's"]
    now = 40
    assert tracebacks.shorten(2, frames) == frames
    assert tracebacks.shorten(0, frames) == [b"Traceback: the same as rank 2's"]


def test_a_traceback_in_pieces_and_one_that_does_not_end():
    written = Written()
    written.feed(0, FRAMES + b"KeyError: 1\n", STDERR)
    written.take()
    written.feed(1, FRAMES[:50], STDERR)
    written.feed(1, FRAMES[50:] + b"Key", STDERR)
    written.feed(1, b"Error: 1\n", STDERR)
    assert written.take() == b"[1] Traceback: the same as rank 0's\n[1] KeyError: 1\n"
    written.feed(1, FRAMES, STDERR)
    assert written.take() == b""
    written.output.end()
    shown = [*FRAMES.splitlines(), b"  (ended before it had said what was raised)"]
    assert written.take() == b"".join(b"[1] " + line + b"\n" for line in shown)


def test_a_traceback_that_stops_in_the_middle_is_shown_after_a_moment():
    written = Written()
    written.feed(0, FRAMES, STDERR)
    while written.output.show_waiting():
        pass
    assert written.take() == b"".join(b"[0] " + line + b"\n" for line in FRAMES.splitlines())
