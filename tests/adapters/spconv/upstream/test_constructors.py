"""Constructors that write their arguments once: by position and by name, as inspection shows them."""

from __future__ import annotations

import inspect

import pytest

from sparse_bridge.adapters.spconv.upstream.constructors import REQUIRED, takes


class Base:
    def __init__(self, width, depth=2, bias=True, key=None):
        self.arguments = width, depth, bias, key


class Layer(Base):
    @takes(Base.__init__, "width key depth", depth=REQUIRED, key=REQUIRED, name=None, ignored="old")
    def __init__(self, name=None, **arguments):
        super().__init__(bias=False, **arguments)
        self.name = name


def test_arguments_by_position_and_by_name():
    assert str(inspect.signature(Layer)) == "(width, key, depth, name=None)"
    assert inspect.getfullargspec(Layer.__init__).args == ["self", "width", "key", "depth", "name"]
    one = Layer(1, "k", 3, "n", old=True)
    assert (one.arguments, one.name) == ((1, 3, False, "k"), "n")
    assert Layer(depth=3, width=1, key="k").arguments == (1, 3, False, "k")


@pytest.mark.parametrize(
    "args, keywords, reason",
    [
        ((1, "k"), {}, "missing a required argument: 'depth'"),
        ((1, "k", 3, "n", 5), {}, "too many positional arguments"),
        ((1, "k", 3), {"width": 1}, "multiple values for argument 'width'"),
        ((1, "k", 3), {"bias": True}, "unexpected keyword argument 'bias'"),
    ],
)
def test_wrong_arguments_name_the_layer(args, keywords, reason):
    with pytest.raises(TypeError, match=rf"^Layer\.__init__\(\): .*{reason}"):
        Layer(*args, **keywords)


def test_errors_of_the_constructor_are_its_own():
    class Refusing(Base):
        @takes(Base.__init__)
        def __init__(self, **arguments):
            raise TypeError("not this width")

    with pytest.raises(TypeError, match=r"^not this width$"):
        Refusing(1)
