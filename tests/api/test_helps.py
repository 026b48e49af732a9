"""What the commands say of themselves, and of a line that they do not understand."""

from __future__ import annotations

import argparse
import pathlib

import pytest

from sparse_bridge import __main__ as command_line
from sparse_bridge.adapters import base
from sparse_bridge.tools.harness.arguments import path
from tests.docs.test_prose import unwanted, uses

COMMANDS = ["doctor", *command_line._LAZY]


def below(parser):
    """A parser and those of its sub-commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in dict.fromkeys(action.choices.values()):
                yield from below(one)


def parsers_of(command):
    top = command_line.make_parser(command)
    (actions,) = (a for a in top._actions if isinstance(a, argparse._SubParsersAction))
    return list(below(actions.choices[command]))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained_and_says_its_default(command):
    for parser in parsers_of(command):
        for action in parser._actions:
            if isinstance(action, (argparse._SubParsersAction, argparse._HelpAction)):
                continue
            assert action.help, (parser.prog, action.dest)
            chosen = action.default not in (None, False, (), [], argparse.SUPPRESS)
            if action.option_strings and action.nargs != 0 and chosen:
                said = action.help == argparse.SUPPRESS or "default" in action.help
                assert said, (parser.prog, action.option_strings, action.default)


@pytest.mark.parametrize("command", COMMANDS)
def test_helps_have_the_words_of_the_pages(command):
    for parser in parsers_of(command):
        for text in [parser.description or "", *(action.help or "" for action in parser._actions)]:
            for word, instead in unwanted().items():
                assert not uses(text, word), f"{text!r}: rather {instead}"


@pytest.mark.parametrize("command", COMMANDS)
def test_an_empty_text_is_no_path(command):
    """`--out "$DIR"` of a variable that is not set would be the current folder."""
    actions = [action for parser in parsers_of(command) for action in parser._actions]
    assert not [action.dest for action in actions if action.type is pathlib.Path]
    for action in actions:
        if action.type is path:
            with pytest.raises(argparse.ArgumentTypeError, match="got an empty text"):
                action.type("")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("run", ["flex_gemm", "torchsparse", "spconv_triton", "--profile", "-v", "default: 100"]),
        ("verify", ["default: 0.5", "default: 12 and 14"]),
        ("warm", ["ovi is output channels, kernel, input channels", "default: 20000 100000"]),
    ],
)
def test_what_a_help_names(command, words, capsys):
    with pytest.raises(SystemExit):
        command_line.main([command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for word in words:
        assert word in shown


def test_the_first_help_names_every_framework(capsys):
    with pytest.raises(SystemExit):
        command_line.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for adapter in base.frameworks():
        if adapter.name in base.ADAPTERS:
            assert adapter.title in shown


@pytest.mark.parametrize(
    ("started", "shown"),
    [
        ("/usr/bin/sparse-bridge", "sparse-bridge"),
        ("C:\\Scripts\\sparse-bridge.exe".replace("\\", "/"), "sparse-bridge"),
        ("/site-packages/sparse_bridge/__main__.py", "python -m sparse_bridge"),
    ],
)
def test_usage_says_how_the_program_was_started(started, shown, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [started])
    for words in (["--help"], ["doctor", "--help"]):
        with pytest.raises(SystemExit):
            command_line.main(words)
        usage = capsys.readouterr().out.splitlines()[0]
        assert usage.startswith(f"usage: {' '.join([shown, *words[:-1]])} [")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "required: COMMAND"),
        (("nonsense",), "'nonsense'"),
        (("run",), "required: SCRIPT; see"),
        (("run", "--mode", "fast", "train.py"), "'fast'"),
        (("run", "--framework", "", "train.py"), "'' names none; expected some of"),
        (("run", "--framework", ",", "train.py"), "',' names none; expected some of"),
        (("doctor", "--nonsense"), "--nonsense"),
        (("demo", "--repeats", "many"), "invalid int value: 'many'"),
        (("cache",), "required: ACTION"),
        (("verify", "openpcdet"), "--checkpoint"),
        (("prove", "--minutes"), "--minutes"),
        (("package", "second", "--out", ""), "--out: got an empty text; expected a path"),
    ],
)
def test_wrong_usage_is_one_line(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main(list(words))
    shown = capsys.readouterr()
    assert ended.value.code == 2 and not shown.out
    assert shown.err.startswith("sparse_bridge: ") and shown.err.count("\n") == 1
    assert said in shown.err and "--help`" in shown.err
