"""A module of settings, which programs of `closed_programs` read and write."""

from __future__ import annotations

SCALE, FACTOR, FACTORS, LAST = 1.0, 2.0, {"x": 1.0}, 0
_calls = 0


class Options:
    width = 1.0


def factor(name):
    return FACTORS[name]


def count():
    global _calls
    _calls += 1


def say(text):
    print(text)
