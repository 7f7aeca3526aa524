"""Configuration: precedence, refusals, and a resolved copy that loads again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from echo_node.config import DemoConfig, load_config, no_color, write_resolved
from echo_node.errors import ConfigError


@pytest.fixture
def file(tmp_path):
    def write(text: str | bytes):
        at = tmp_path / "run.toml"
        at.write_bytes(text if isinstance(text, bytes) else text.encode())
        return at

    return write


def test_without_anything_the_defaults_hold():
    assert load_config(DemoConfig) == DemoConfig()


def test_flags_win_over_set_and_set_over_the_file(file):
    at = file('steps = 10\nseed = 1\nmode = "sequential"\n[algorithm]\nkl = 0.1\nveto = 0.2\n')
    config = load_config(DemoConfig, at, ["seed=2", "steps=20", "algorithm.kl=0.5"], steps=30, samplers=None)
    assert (config.mode, config.seed, config.steps) == ("sequential", 2, 30)
    assert config.samplers == DemoConfig().samplers, "a flag that was not given is no wish"
    assert config.algorithm == {"kl": 0.5, "veto": 0.2}
    assert load_config(DemoConfig, None, ["seed=2", "seed=3"]).seed == 3


@pytest.mark.parametrize(
    ("word", "name", "value"),
    [
        ("mode=sequential", "mode", "sequential"),
        ('mode="sequential"', "mode", "sequential"),
        ("steps=1_000", "steps", 1000),
        ("temperature=0.5", "temperature", 0.5),
        ("algorithm.advantage=normalised", "algorithm", {"advantage": "normalised"}),
        ("algorithm.learning_rate=1e-4", "algorithm", {"learning_rate": 1e-4}),
        ("algorithm={kl = 0.5, warm_up = 3}", "algorithm", {"kl": 0.5, "warm_up": 3}),
        ("algorithm.a=b=c", "algorithm", {"a": "b=c"}),
        ("algorithm.a=", "algorithm", {"a": ""}),
        ("algorithm.a=1 # not a comment of mine", "algorithm", {"a": 1}),
    ],
)
def test_a_word_of_set_is_read_as_toml_and_else_as_plain_text(word, name, value):
    assert getattr(load_config(DemoConfig, None, [word]), name) == value


def refusal(*args, **given_flags) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(DemoConfig, *args, **given_flags)
    told = str(caught.value)
    assert "\n" not in told
    assert len(told) < 1_500
    return told


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("steps", "--set takes name=value"),
        ("=5", "--set takes name=value"),
        ("", "--set takes name=value"),
        ("steps=0", "steps"),
        ("steps=many", "steps"),
        ("steps=1.5", "steps"),
        ("steps=inf", "steps"),
        ("steps=" + "9" * 5_000, "steps"),
        ("steps=" + "[" * 5_000, "steps"),
        ("steps=[1]", "steps"),
        ("steps=2020-01-01", "steps"),
        ("step=5", "step"),
        ("mode=fast", "mode"),
        ("mode=true", "mode"),
        ("seed=-1", "seed"),
        ("seed=9223372036854775808", "seed"),
        ("staleness=9", "staleness"),
        ("temperature=nan", "temperature"),
        ("temperature=inf", "temperature"),
        ("group_size=1", "group_size"),
        ("algorithm=5", "algorithm"),
        ("algorithm.kl=nan", "algorithm.kl"),
        ("algorithm.kl=inf", "algorithm.kl"),
        ("algorithm.kl=-inf", "algorithm.kl"),
        ("algorithm.kl=[1]", "algorithm.kl"),
        ("algorithm.kl.deep=1", "algorithm.kl"),
        ("steps.deep=1", "steps"),
        ("a..b=1", "a"),
        ("steps=\x1b[31m", "steps"),
        ("mode=\udcff", "mode"),
        ("algorithm.a=\udcff", "algorithm.a"),
    ],
)
def test_every_bad_word_is_one_line_that_names_it(word, named):
    assert named in refusal(None, [word])


def test_a_value_cannot_be_gone_into_as_a_table(file):
    assert "is a value, not a table" in refusal(file("steps = 5\n"), ["steps.deep=1"])
    assert "is a value, not a table" in refusal(None, ["algorithm.kl=1", "algorithm.kl.deep=1"])


@pytest.mark.parametrize(
    "text",
    ["steps = ", "steps = 1\nsteps = 2\n", b"\xff\xfe\x00", "[algorithm\n", "a = " + "[" * 5_000, "\x00"],
)
def test_a_file_that_is_no_toml_is_said_so(file, text):
    told = refusal(file(text))
    assert "run.toml" in told
    assert "TOML" in told


def test_a_file_of_an_editor_that_marks_its_utf_8_is_read(file):
    assert load_config(DemoConfig, file("\ufeffsteps = 5\n")).steps == 5


def test_what_follows_the_value_of_set_is_not_dropped():
    assert "steps" in refusal(None, ["steps=5\nseed=7"])


def test_a_file_that_is_not_there_or_is_none_is_said_so(tmp_path):
    assert "nowhere.toml" in refusal(tmp_path / "nowhere.toml")
    assert "reading" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["stpes = 5\n", "[algoritm]\nkl = 1\n", "[steps]\na = 1\n", "mode = 5\n"])
def test_a_file_with_a_wrong_setting_is_told_which(file, text):
    name = text.split("\n")[0].strip("[]").split(" ")[0]
    assert name in refusal(file(text))


def test_a_bad_flag_is_refused_like_everything_else():
    assert "mode" in refusal(mode="fast")
    assert "steps" in refusal(steps=0)


def test_a_configuration_does_not_change():
    with pytest.raises(ValidationError):
        DemoConfig().steps = 5


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
configs = st.builds(
    DemoConfig,
    mode=st.sampled_from(["sequential", "async"]),
    steps=st.integers(1, 100_000),
    seed=st.integers(0, 2**63 - 1),
    samplers=st.integers(1, 16),
    temperature=st.floats(0.1, 10.0),
    algorithm=st.dictionaries(
        names,
        st.one_of(st.integers(-(2**60), 2**60), st.floats(allow_nan=False, allow_infinity=False), names),
        max_size=4,
    ),
)


@given(configs)
def test_the_resolved_file_reads_back_as_the_same_configuration(tmp_path_factory, config):
    at = tmp_path_factory.mktemp("run") / "config.toml"
    write_resolved(config, at)
    again = load_config(DemoConfig, at)
    assert again == config
    assert [type(value) for value in again.algorithm.values()] == [
        type(value) for value in config.algorithm.values()
    ]


def test_what_was_set_by_hand_is_in_the_resolved_file_with_all_the_rest(tmp_path):
    at = tmp_path / "config.toml"
    config = load_config(DemoConfig, None, ["algorithm.learning_rate=1e-4", "algorithm.advantage=normalised"])
    write_resolved(config, at)
    text = at.read_text("utf-8")
    assert "steps = 220\n" in text
    assert "1e-05" not in text
    assert "0.0001" in text
    assert load_config(DemoConfig, at) == config


@pytest.mark.parametrize(("value", "asked"), [("1", True), ("0", True), ("", False), (None, False)])
def test_no_color_is_asked_for_by_any_text_but_none(monkeypatch, value, asked):
    monkeypatch.delenv("NO_COLOR", raising=False)
    if value is not None:
        monkeypatch.setenv("NO_COLOR", value)
    assert no_color() is asked
