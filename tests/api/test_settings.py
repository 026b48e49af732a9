"""Settings: what the environment says, in today's names and in those of earlier releases."""

from __future__ import annotations

import dataclasses
import warnings

import pytest

from sparse_bridge import settings
from sparse_bridge.errors import SettingError


def read(**variables: str) -> settings.Settings:
    return settings.from_environment({f"SPARSE_BRIDGE_{k}": v for k, v in variables.items()})


def changed(found: settings.Settings) -> dict[str, object]:
    """The fields that differ from the defaults."""
    plain = dataclasses.asdict(settings.Settings())
    return {name: value for name, value in dataclasses.asdict(found).items() if value != plain[name]}


def test_every_field_has_one_variable_and_there_are_nine():
    keywords = [name for names in settings.KEYWORDS.values() for name in names]
    assert sorted(keywords) == sorted(settings.FIELDS)
    assert len(settings.KEYWORDS) <= 9
    assert not settings.KEYWORDS.keys() & settings.RENAMED.keys()


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({}, {}),
        ({"DATAFLOW": "explicit", "OPTIMIZE": "graphs"}, {"dataflow": "explicit", "optimize": "graphs"}),
        ({"STARTUP": "warmup=off, self_check"}, {"warmup": False}),
        ({"CAPTURE": "off"}, {"capture": "off"}),
        ({"OPTIMIZE": "inference:0"}, {"optimize": "inference", "compare_every": 0}),
        ({"TUNE": "off"}, {"tune": "off"}),
        ({"TUNE": "pinned:C:/a.json"}, {"tune": "pinned", "tune_file": "C:/a.json"}),
        (
            {"ENABLE": "mode=patch, strict,torchsparse_profile=1.4"},
            {"mode": "patch", "strict": True, "torchsparse_profile": "1.4"},
        ),
        ({"ENABLE": "strict=0"}, {}),
        ({"RULES": "groups,shared_keys=1,"}, {"groups": True, "shared_keys": True}),
    ],
)
def test_today(given, want):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert changed(read(**given)) == want


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"DATAFLOW": "fast"}, ("SPARSE_BRIDGE_DATAFLOW", "'fast'", "per_offset")),
        ({"CAPTURE": "1"}, ("SPARSE_BRIDGE_CAPTURE", "prefetch")),
        ({"TUNE": "full:x"}, ("SPARSE_BRIDGE_TUNE", "'full:x'")),
        ({"STARTUP": "self_check=2"}, ("self_check in SPARSE_BRIDGE_STARTUP", "0 or 1")),
        ({"OPTIMIZE": "1"}, ("SPARSE_BRIDGE_OPTIMIZE", "auto, graphs, inference, fuse, off")),
        ({"OPTIMIZE": "fuse:4"}, ("SPARSE_BRIDGE_OPTIMIZE is 'fuse:4'", "leave the number out")),
        ({"OPTIMIZE": "off:0"}, ("SPARSE_BRIDGE_OPTIMIZE is 'off:0'", "leave the number out")),
        ({"OPTIMIZE": "auto:"}, ("SPARSE_BRIDGE_OPTIMIZE is 'auto:'", "a number behind the colon")),
        ({"OPTIMIZE": "inference:-1"}, ("SPARSE_BRIDGE_OPTIMIZE is 'inference:-1'", "0 or more")),
        ({"TUNE": "pinned:"}, ("SPARSE_BRIDGE_TUNE is 'pinned:'", "a file")),
        ({"ENABLE": "patch"}, ("SPARSE_BRIDGE_ENABLE", "'patch'", "torchsparse_profile")),
        ({"ENABLE": "mode=fast"}, ("mode in SPARSE_BRIDGE_ENABLE", "standin")),
        ({"RULES": "grops"}, ("SPARSE_BRIDGE_RULES names 'grops'", "Did you mean: 'groups'?")),
        ({"RULES": "groups=3"}, ("groups in SPARSE_BRIDGE_RULES", "0 or 1")),
    ],
)
def test_bad_values_are_named(given, named):
    with pytest.raises(SettingError) as caught:
        read(**given)
    assert all(word in str(caught.value) for word in named), caught.value


OLD = {
    "AHEAD": ("0", {"capture": "off", "warmup": False}, "SPARSE_BRIDGE_STARTUP=warmup=0"),
    "MAP_GRAPHS": ("0", {}, "SPARSE_BRIDGE_CAPTURE=prefetch"),
    "WARMUP": ("0", {"warmup": False}, "SPARSE_BRIDGE_STARTUP=warmup"),
    "SELF_CHECK": ("0", {"self_check": False}, "SPARSE_BRIDGE_STARTUP=self_check"),
    "TUNE_FILE": ("a.json", {"tune_file": "a.json"}, "SPARSE_BRIDGE_TUNE=pinned:FILE"),
    "MODE": ("patch", {"mode": "patch"}, "SPARSE_BRIDGE_ENABLE=mode"),
    "STRICT": ("1", {"strict": True}, "SPARSE_BRIDGE_ENABLE=strict"),
    "TORCHSPARSE_PROFILE": ("1.4", {"torchsparse_profile": "1.4"}, "SPARSE_BRIDGE_ENABLE="),
    "GROUPS": ("1", {"groups": True}, "SPARSE_BRIDGE_RULES=groups"),
    "SHARED_KEYS": ("1", {"shared_keys": True}, "SPARSE_BRIDGE_RULES=shared_keys"),
    "TORCHSPARSE_KEEP_TAIL": ("1", {"torchsparse_keep_tail": True}, "SPARSE_BRIDGE_RULES="),
}


@pytest.mark.parametrize("name", sorted(settings.RENAMED))
def test_names_of_earlier_releases(name):
    value, want, new = OLD[name]
    with pytest.warns(FutureWarning, match=f"SPARSE_BRIDGE_{name} is called .*{new}"):
        assert changed(read(**{name: value})) == want


@pytest.mark.parametrize("name", [*settings.KEYWORDS, *sorted(settings.RENAMED)])
def test_an_empty_variable_is_not_set(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert changed(read(**{name: ""})) == {}


def test_what_earlier_names_mean_together():
    with pytest.warns(FutureWarning):
        assert changed(read(AHEAD="0", MAP_GRAPHS="0")) == {"capture": "off", "warmup": False}
    with pytest.warns(FutureWarning):
        assert changed(read(AHEAD="1", MAP_GRAPHS="1")) == {}
    with pytest.warns(FutureWarning):
        assert changed(read(AHEAD="0", CAPTURE="prefetch")) == {"warmup": False}
    with pytest.warns(FutureWarning), pytest.raises(SettingError, match="SPARSE_BRIDGE_AHEAD"):
        read(AHEAD="maybe")


@pytest.mark.parametrize(
    "name, value, today",
    [(name, value, today) for name, values in settings.RENAMED_VALUES.items() for value, today in values.items()],
)
def test_values_of_earlier_releases(plain_settings, name, value, today):
    variable = f"SPARSE_BRIDGE_{name.upper()}"
    said = f"{variable}={value} is called {variable}={today} now"
    with pytest.warns(FutureWarning, match=said):
        assert getattr(read(**{name.upper(): value}), name) == today
    with (
        pytest.warns(FutureWarning, match=f"^{name}={value} is called {name}={today} now"),
        settings.override(**{name: value}) as now,
    ):
        assert getattr(now, name) == today


def test_keywords_of_earlier_releases(plain_settings):
    with pytest.warns(FutureWarning, match="ahead is called capture and warmup"):
        settings.update(ahead=False)
    assert changed(settings.get()) == {"capture": "off", "warmup": False}


@pytest.mark.parametrize("value", [0, 1, False, True, "0", "on"])
def test_a_switch_is_0_or_1_in_python_too(plain_settings, value):
    with settings.override(strict=value) as now:
        assert now.strict is (value in (1, "on"))


@pytest.mark.parametrize("value", [2, -1, 1.0, None, "maybe"])
def test_a_switch_is_nothing_else(plain_settings, value):
    with pytest.raises(SettingError, match=r"strict is .*; expected 0 or 1"), settings.override(strict=value):
        pass


def test_reset_reads_the_environment_again(plain_settings, monkeypatch):
    monkeypatch.setenv("SPARSE_BRIDGE_FP32", "ieee")
    assert settings.get().fp32 == "auto"
    settings.reset()
    assert settings.get().fp32 == "ieee"
