"""What makes an algorithm, and the ways to name one."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import pytest

from bagua.algorithms import (
    Algorithm,
    ByteGrad,
    Decentralized,
    Exchange,
    LocalSGD,
    PerParameter,
    PowerSGD,
    TopK,
    algorithm,
    find,
    other_names,
    register,
)
from bagua.algorithms.exchange import as_written
from bagua.common.errors import UsageError


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(algorithm, "_REGISTRY", dict(algorithm._REGISTRY))


class Bare(Algorithm):
    codec: str = "fp16"


class Adds(Algorithm):
    share: float = 0.5


@dataclass(frozen=True)
class Untyped(ByteGrad):
    codec = "fp16"


class Fits(ByteGrad):
    """What is no choice needs no decorator."""

    name = "fits"
    note: ClassVar[str] = "of the class"

    def plan(self, bucket, world, step):
        return super().plan(bucket, world, step)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Bare, r"Bare\.codec would not count, .* put @dataclass\(frozen=True\) above the class$"),
        (Adds, r"Adds\.share would not count, .* put @dataclass\(frozen=True\) above the class$"),
        (Untyped, r"Untyped\.codec .* and write a type, as in codec: str = \.\.\."),
    ],
)
def test_a_default_that_would_be_lost_is_refused(kind, words):
    with pytest.raises(UsageError, match=words):
        kind()
    kind.name = "mine"
    with pytest.raises(UsageError, match=words):
        register(kind)


def test_a_class_without_fields_of_its_own_needs_no_decorator():
    assert find(register(Fits).name) == Fits()
    assert Fits(codec="fp16").codec == "fp16"


def defined():
    @dataclass(frozen=True)
    class Mine(Algorithm):
        name: ClassVar[str] = "mine"

    return Mine


def test_a_name_is_that_of_one_class():
    first = register(defined())
    again = register(defined())  # as a notebook does
    assert first is not again
    assert type(find("mine")) is again

    @dataclass(frozen=True)
    class Inherits(TopK):
        density: float = 0.1

    with pytest.raises(UsageError, match=r"'topk' is that of bagua.*TopK: give Inherits one"):
        register(Inherits)
    assert type(find("topk")) is TopK


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (ByteGrad, r"algorithm=ByteGrad is a class; give an instance: ByteGrad\(\)"),
        (["topk"], r"a name, as 'bytegrad', or an object, as ByteGrad\(\), not \['topk'\]"),
        (3, r"a name, as 'bytegrad', or an object, as ByteGrad\(\), not 3"),
        ("topkk", "unknown algorithm 'topkk'; known: .*; did you mean 'topk'"),
        ("async", "unknown algorithm 'async'; known: .*; did you mean 'async_model_average'"),
        ("adasum_for_large", "'adasum_for_large'; known: .*topk; one of the script's own must be"),
        (
            "minmax_u4",
            r"'minmax_u4' is a codec, .*ByteGrad\(codec='minmax_u4', error_feedback=True\)",
        ),
        ("SIGN1", r"'sign1' is a codec, .*ByteGrad\(codec='sign1'\)"),
    ],
)
def test_what_is_no_algorithm(given, words):
    with pytest.raises(UsageError, match=words):
        find(given)
    with pytest.raises(UsageError, match=words):
        PerParameter({"*": given})


def test_an_unknown_argument():
    words = "LocalSGD has no argument evry; did you mean 'every'.*; it has: what, codec, .*every"
    with pytest.raises(UsageError, match=words):
        LocalSGD(evry=8)
    with pytest.raises(UsageError, match="PerParameter has no argument choices; did you mean"):
        PerParameter(choices={})


@pytest.mark.parametrize(
    ("kind", "other", "words"),
    [
        (Decentralized, "interval", r"; here that is every=\.\.\.; it has: "),
        (LocalSGD, "overlap", r"; here that is when='forward'; it has: "),
        (PowerSGD, "start_step", r"; here that is warmup_steps=\.\.\.; it has: "),
        (PowerSGD, "rank", r"; here that is low_rank=\.\.\.; it has: "),
        (PerParameter, "rank", "; it has: choice"),
    ],
)
def test_an_argument_by_another_name(kind, other, words):
    with pytest.raises(UsageError, match=f"{kind.__name__} has no argument {other}{words}"):
        kind(**{other: 2})


def test_other_names_are_of_arguments_that_there_are():
    arguments = {field.name for name in algorithm.names() for field in fields(find(name))}
    for other, (name, written) in other_names._ARGUMENTS.items():
        assert other not in arguments
        assert name in arguments
        assert written.startswith(f"{name}=")


@pytest.mark.parametrize("made", [LocalSGD(every=8), PerParameter({"*": "topk"})], ids=str)
def test_copies(made):
    assert copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == made
    if isinstance(made, LocalSGD):
        assert replace(made, every=4) == LocalSGD(every=4)


def test_patterns_that_match_nothing():
    names = ["head.weight", "body.weight"]
    assert PerParameter({"head.*": "topk", "tail": "topk", "*": "topk"}).unmatched(names) == [
        "tail"
    ]
    assert PerParameter(lambda name, shape: None).unmatched(names) == []


class Near:
    """A callable object, of which every process has one of its own."""

    def __call__(self, name: str, shape: tuple[int, ...]) -> bool:
        return True


def test_all_are_written_alike_in_every_process():
    """Ranks and checkpoints compare it, of classes that nobody has registered, too."""

    @dataclass(frozen=True)
    class Mine(Algorithm):
        more: int = 1

    @dataclass
    class Apart:
        names: object
        __repr__ = as_written

    for chosen, said in {Near(): "Near", Near.__call__: "Near.__call__"}.items():
        assert repr(Mine(exact=chosen, more=2)) == f"Mine(exact={said}, more=2)"
    assert repr(Mine()) == "Mine()"
    names = frozenset(map(str, range(10)))
    assert repr(Apart(names)) == f"Apart(names={{{', '.join(map(repr, sorted(names)))}}})"
    assert repr(Apart(object())) == "Apart(names=object())"
    assert repr(Exchange(codec="fp16")) == "Exchange(codec='fp16')"


def test_what_may_change_with_time():
    class Own(TopK):
        name = ""

        def at(self, step):
            return self if step < 5 else Algorithm()

    assert [TopK().changes, TopK(warmup_steps=3).changes, Own().changes] == [False, True, True]
    assert [LocalSGD().changes, LocalSGD(warmup_steps=3).changes] == [False, True]
