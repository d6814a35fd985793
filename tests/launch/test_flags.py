"""Command lines as people write them, their config files, and what is refused."""

import dataclasses
import importlib.util
import json
import sys

import pytest

from bagua.common.config import Config
from bagua.common.errors import UsageError
from bagua.launch.familiar import NO_EFFECT, NOT_YET, ONLY
from bagua.launch.flags import flag_environment, parse_command_line


def refusal(*arguments):
    with pytest.raises(UsageError) as caught:
        parse_command_line(arguments)
    return str(caught.value)


def test_flags_end_where_the_program_begins():
    options = parse_command_line(
        ["-np", "4", "--verbose", "python", "-u", "x.py", "--verbose", "-np", "9"]
    )
    assert (options.num_proc, options.verbose) == (4, True)
    assert options.command == ["python", "-u", "x.py", "--verbose", "-np", "9"]


def test_two_dashes_end_the_flags():
    assert parse_command_line(["-np=2", "--", "-strange"]).command == ["-strange"]


@pytest.mark.parametrize(
    "words", ["-np 2", "-n 2", "--np 2", "-np2", "-n2", "-np=2", "--np=2", "--nproc_per_node=2"]
)
def test_ways_to_give_the_number_of_ranks(words):
    options = parse_command_line([*words.split(), "x", "-np", "3"])
    assert (options.num_proc, options.command) == (2, ["x", "-np", "3"])


def test_a_module_is_a_program():
    options = parse_command_line(["-np", "2", "-m", "pkg.mod", "--verbose"])
    assert (options.command, options.verbose) == (["-m", "pkg.mod", "--verbose"], False)


def test_every_setting_is_a_flag():
    for setting in dataclasses.fields(Config):
        name = "--" + setting.name.replace("_", "-")
        if isinstance(setting.default, bool):
            no = name.replace("--", "--no-", 1)
            assert parse_command_line([name, "x"]).settings == {setting.name: "true"}
            assert parse_command_line([no, "x"]).settings == {setting.name: "false"}
            told = parse_command_line([f"{name}=false", "x"])
            assert (told.settings, told.command) == ({setting.name: "false"}, ["x"])
            assert parse_command_line([name, "--", "false"]).command == ["false"]
        else:
            text = str(setting.default)
            assert parse_command_line([name, text, "x"]).settings == {setting.name: text}


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        (["--start-timeout", "9"], {"start_timeout_s": "9"}),
        (["--network-interface", "lo"], {"network_interfaces": "lo"}),
        (["--fusion-threshold-mb", "8"], {"fusion_mb": "8"}),
        (["--stall-check-warning-time-seconds", "5"], {"stall_warn_s": "5"}),
        (["--stall-check-shutdown-time-seconds", "6"], {"stall_fail_s": "6"}),
        (["--no-stall-check"], {"stall_warn_s": "0"}),
        (["--log-level", "FATAL"], {"log_level": "error"}),
    ],
)
def test_familiar_names_of_settings(arguments, settings):
    assert parse_command_line([*arguments, "x"]).settings == settings


@pytest.mark.parametrize(("flag", "value", "why"), ONLY)
def test_flags_with_one_value(flag, value, why):
    assert parse_command_line([flag, value, "program"]).command == ["program"]
    assert why in refusal(flag, "7", "program")


@pytest.mark.parametrize(("flag", "has_value", "why"), NO_EFFECT)
def test_flags_without_effect_are_accepted_and_say_so(flag, has_value, why):
    options = parse_command_line([flag, *["1"] * has_value, "program"])
    assert options.command == ["program"]
    assert options.notes == ([f"{flag} has no effect: {why}"] if why else [])


@pytest.mark.parametrize(("flag", "has_value", "why"), NOT_YET)
def test_flags_of_missing_features_are_refused(flag, has_value, why):
    assert refusal(flag, *["1"] * has_value, "x") == f"{flag} is not in this version: {why}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num-prc", "4"], "unknown flag --num-prc; did you mean '--num-proc'?"),
        (["-np"], "flag -np needs a value"),
        (["-np", "0"], "'0' is not a number of at least 1"),
        (["--fusion-mb", "-3", "x"], "flag --fusion-mb: '-3' is not allowed"),
        (["--allreduce", "rings", "x"], "did you mean 'ring'?"),
        (["--bind-to", "heap", "x"], "heap"),
        (["--nccl", "false", "x"], "settings that are on or off are told =true or =false"),
        (["-np", "2", "--own-gpu", "yes", "x"], "what follows --own-gpu would be the program"),
        (["--inline-drive=flase", "x"], "flag --inline-drive: 'flase' is not allowed"),
    ],
)
def test_refusals(arguments, words):
    assert words in refusal(*arguments)


def test_the_help_shows_how_to_switch_off(capsys):
    with pytest.raises(SystemExit):
        parse_command_line(["--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "--inline-drive [=false] " in words
    assert "--no-inline-drive same as --inline-drive=false" in words


def test_environment(monkeypatch):
    monkeypatch.setenv("HERE", "1")
    options = parse_command_line(["-x", "HERE", "-x", "NEW=a=b", "--bucket-mb", "5", "x"])
    assert flag_environment(options) == {"BAGUA_BUCKET_MB": "5", "HERE": "1", "NEW": "a=b"}
    with pytest.raises(UsageError, match="no variable 'NOT_HERE'"):
        flag_environment(parse_command_line(["-x", "NOT_HERE", "x"]))
    for word, said in {
        "BAGUA_FUSION_BM=3": "did you mean 'BAGUA_FUSION_MB'",
        "BAGUA_FUSION_MB=much": "-x BAGUA_FUSION_MB: 'much' is not allowed",
    }.items():
        with pytest.raises(UsageError, match=said):
            flag_environment(parse_command_line(["-x", word, "x"]))


ENTRIES = {
    "num_proc": 3,
    "verbose": True,
    "inline-drive": False,
    "x": ["A=1", "B=2"],
    "stall_check": {"warning_time_seconds": 5},
    "params": {"fusion_threshold_mb": 8},
}


def check_entries(path):
    options = parse_command_line(["--config-file", str(path), "--fusion-mb", "9", "x"])
    assert (options.num_proc, options.verbose, options.environment) == (3, True, ["A=1", "B=2"])
    assert options.settings == {"inline_drive": "false", "stall_warn_s": "5", "fusion_mb": "9"}


def test_config_file_json(tmp_path):
    path = tmp_path / "job.json"
    path.write_text(json.dumps(ENTRIES))
    check_entries(path)


def test_config_file_toml(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(
        'num_proc = 3\nverbose = true\ninline-drive = false\nx = ["A=1", "B=2"]\n'
        "[stall_check]\nwarning_time_seconds = 5\n[params]\nfusion_threshold_mb = 8\n"
    )
    if sys.version_info >= (3, 11):
        check_entries(path)
    else:
        assert "needs Python 3.11" in refusal("--config-file", str(path), "x")


def test_config_file_yaml(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(ENTRIES))  # every JSON text is a YAML text
    if importlib.util.find_spec("yaml"):
        check_entries(path)
    else:
        assert "pip install pyyaml" in refusal("--config-file", str(path), "x")


def test_config_file_refusals(tmp_path):
    path = tmp_path / "job.json"
    path.write_text('{"fusion-bm": 3}')
    assert "did you mean '--fusion-mb'?" in refusal("--config-file", str(path), "x")
    path.write_text("{")
    assert str(path) in refusal("--config-file", str(path), "x")
    assert "No such file" in refusal("--config-file", str(tmp_path / "none.json"), "x")
    path.write_bytes(b'{"x": "\xff"}')
    assert "not text in UTF-8, at byte 7" in refusal("--config-file", str(path), "x")
    for entry in ("config-file", "config_file", "version", "help", "v", "h"):
        path.write_text(json.dumps({entry: "x" if "file" in entry else True}))
        assert "belongs on the command line" in refusal("--config-file", str(path), "x")


def test_the_sections_of_horovods_files(tmp_path):
    path = tmp_path / "job.json"
    params = {"fusion_threshold_mb": 32, "cycle_time_ms": 10, "hierarchical_allreduce": False}
    entries = {
        "controller": "gloo",
        "params": params,
        "autotune": {"log_file": "a.txt"},  # not enabled
        "timeline": None,
        "stall_check": {"enabled": True, "warning_time_seconds": 120},
        "library_options": {"num_nccl_streams": 2, "ccl_bgt_affinity": 1},
        "logging": {"level": "INFO", "hide_timestamp": True},
    }
    path.write_text(json.dumps(entries))
    options = parse_command_line(["--config-file", str(path), "x"])
    assert options.settings == {"fusion_mb": "32", "stall_warn_s": "120", "log_level": "INFO"}
    assert [note.split()[0] for note in options.notes] == [
        "--gloo",
        "--cycle-time-ms",
        "--no-hierarchical-allreduce",
        "--num-nccl-streams",
        "--thread-affinity",
        "--log-hide-timestamp",
    ]


@pytest.mark.parametrize(
    ("entries", "settings"),
    [
        ({"stall_check": {"enabled": False, "warning_time_seconds": 9}}, {"stall_warn_s": "0"}),
        ({"stall-check": {"warning_time_seconds": 9}}, {"stall_warn_s": "9"}),
        ({"autotune": {"enabled": False, "warmup_samples": 3}}, {}),
    ],
)
def test_sections_that_are_switched_off(entries, settings, tmp_path):
    path = tmp_path / "job.json"
    path.write_text(json.dumps(entries))
    assert parse_command_line(["--config-file", str(path), "x"]).settings == settings


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"autotune": {"enabled": True}}, "--autotune is not in this version: set --fusion-mb"),
        ({"timeline": {"filename": "t"}}, "--timeline-filename is not in this version"),
        ({"stall_check": {"enabeld": False}}, "entry 'enabeld', and there is no flag"),
        ({"stall_check": {"enabeld": False}}, "; did you mean 'enabled'?"),
        ({"stall_check": {"enabled": 3}}, "enabled: want true or false, not 3"),
        ({"logging": {"lvel": "INFO"}}, "; did you mean 'level'?"),
        ({"params": {"fusion_bm": 3}}, "; did you mean '--fusion-mb'?"),
        ({"controller": "tcp"}, "'tcp' is neither 'mpi' nor 'gloo'"),
    ],
)
def test_refused_entries_of_sections(entries, words, tmp_path):
    path = tmp_path / "job.json"
    path.write_text(json.dumps(entries))
    said = refusal("--config-file", str(path), "x")
    assert said.startswith(f"--config-file {path}: ")
    assert words in said


def test_an_unknown_entry_gets_no_far_fetched_hint(tmp_path):
    path = tmp_path / "job.json"
    path.write_text('{"logging": {"colour": true}}')
    assert refusal("--config-file", str(path), "x").endswith("no flag --logging-colour or --colour")
