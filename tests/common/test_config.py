"""Keyword > environment > default, and whatever is wrong is said with its source."""

import dataclasses

import pytest

from bagua.common.config import RESERVED_VARIABLES, Config, nearest, variable
from bagua.common.errors import BaguaError, UsageError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for setting in dataclasses.fields(Config):
        monkeypatch.delenv(variable(setting.name), raising=False)


def test_defaults():
    config = Config.resolve()
    assert config == Config()
    assert (config.fusion_mb, config.transport, config.inline_drive) == (16.0, "auto", True)


def test_keyword_beats_environment_beats_default(monkeypatch):
    monkeypatch.setenv("BAGUA_FUSION_MB", "3")
    assert Config.resolve().fusion_mb == 3.0
    assert Config.resolve(fusion_mb=7).fusion_mb == 7.0
    assert type(Config.resolve(fusion_mb=7).fusion_mb) is float


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().fusion_mb = 1.0


@pytest.mark.parametrize("setting", dataclasses.fields(Config), ids=lambda setting: setting.name)
def test_every_field_takes_its_default_as_keyword_and_as_variable(setting, monkeypatch):
    assert setting.metadata["help"]
    assert (
        getattr(Config.resolve(**{setting.name: setting.default}), setting.name) == setting.default
    )
    monkeypatch.setenv(variable(setting.name), str(setting.default))
    assert getattr(Config.resolve(), setting.name) == setting.default


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("TRUE", True), ("yes", True), ("on", True), ("0", False), ("no", False)],
)
def test_truth_in_the_environment(text, value, monkeypatch):
    monkeypatch.setenv("BAGUA_INLINE_DRIVE", text)
    assert Config.resolve().inline_drive is value


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"fusion_mbb": 1}, ["unknown keyword 'fusion_mbb'", "'fusion_mb'"]),
        ({"transport": "mpl"}, ["keyword transport", "'mpl'", "auto, shm, mpi", "'mpi'"]),
        ({"fusion_mb": -1}, ["keyword fusion_mb", "-1", "≥ 0"]),
        ({"bucket_mb": 0}, ["keyword bucket_mb", "> 0"]),
        ({"bucket_mb": float("nan")}, ["keyword bucket_mb", "nan"]),
        ({"stall_warn_s": float("inf")}, ["keyword stall_warn_s", "inf"]),
        ({"fusion_mb": "16"}, ["keyword fusion_mb", "'16'", "a number"]),
        ({"fusion_mb": True}, ["keyword fusion_mb", "True"]),
        ({"inline_drive": 1}, ["keyword inline_drive", "true or false"]),
        ({"algorithm": " "}, ["keyword algorithm", "not empty"]),
        ({"log_level": 3}, ["keyword log_level", "debug"]),
    ],
)
def test_bad_keywords(keywords, words):
    with pytest.raises(UsageError) as caught:
        Config.resolve(**keywords)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("BAGUA_FUSION_MB", "lots", ["variable BAGUA_FUSION_MB", "'lots'", "a number"]),
        ("BAGUA_SPIN_US", "-2", ["variable BAGUA_SPIN_US", "'-2'", "≥ 0"]),
        ("BAGUA_INLINE_DRIVE", "maybe", ["variable BAGUA_INLINE_DRIVE", "true or false"]),
        ("BAGUA_FUSION_BM", "1", ["unknown variable BAGUA_FUSION_BM", "'BAGUA_FUSION_MB'"]),
    ],
)
def test_bad_variables(name, text, words, monkeypatch):
    monkeypatch.setenv(name, text)
    with pytest.raises(UsageError) as caught:
        Config.resolve()
    for word in words:
        assert word in str(caught.value)


def test_reserved_variables_are_known(monkeypatch):
    for name in RESERVED_VARIABLES:
        monkeypatch.setenv(name, "anything")
    assert Config.resolve() == Config()


def test_names_far_off_are_not_suggested():
    assert nearest("nofile.py", ["dist.py"]) == ""
    assert nearest("adasum_for_large", ["async_model_average", "topk"]) == ""
    assert nearest("fp", ["bf16", "fp8_e4m3"]) == ""


def test_names_in_other_letters_are_known():
    assert nearest("SIGN1", ["sign1", "topk"]) == "; did you mean 'sign1'?"
    assert nearest("bytegrad", ["ByteGrad"]) == "; did you mean 'ByteGrad'?"
    assert nearest("ASYNC", ["async_model_average"]) == "; did you mean 'async_model_average'?"


def test_names_cut_short_are_completed():
    assert nearest("low_precision", ["low_precision_decentralized"]) != ""
    assert nearest("fp8", ["bf16", "fp8_e4m3"]) == "; did you mean 'fp8_e4m3'?"
    assert "'async_model_average'" in nearest("async", ["never_once_async", "async_model_average"])


def test_choices_and_texts_are_tidied():
    config = Config.resolve(log_level="INFO", network_interfaces=" eth0,eth1 ")
    assert (config.log_level, config.network_interfaces) == ("info", "eth0,eth1")


def test_what_must_agree():
    assert Config(fusion_mb=3.0).agreeing() == {
        "transport": "auto",
        "allreduce": "auto",
        "fusion_mb": 3.0,
        "bucket_mb": 10.0,
        "nccl": True,
        "nccl_register": False,
        "allow_shared_gpu": False,
        "carriers": "auto",
        "algorithm": "gradient_allreduce",
        "check_replicas_every": 0.0,
        "check_finite": "watch",
        "learn_bucket_order": True,
    }


def test_a_usage_error_is_a_value_error_and_ours():
    assert issubclass(UsageError, ValueError)
    assert issubclass(UsageError, BaguaError)
