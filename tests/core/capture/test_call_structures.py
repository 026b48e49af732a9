"""What calls are told apart by, and what their outputs are made of: over a framework of two lines."""

from __future__ import annotations

import collections
import copy
import functools
import math
import types

import pytest
import torch

from sparse_bridge.core.capture.calls.call import call_of, constant, other_inputs, read_constants
from sparse_bridge.core.capture.calls.output_spec import OutputSpec
from sparse_bridge.core.capture.calls.structures import (
    MISSING,
    StructureCheck,
    has_numbers,
    map_structure,
    share_memory,
)
from sparse_bridge.refusals import Refusal, Why


class Sparse:
    __slots__ = ("coords", "features")

    def __init__(self):
        self.features, self.coords = torch.ones(2, 3), torch.zeros(2, 4, dtype=torch.int32)

    def __repr__(self):
        return "Sparse"  # in the names of tests, which are to be the same in every process


class Framework:
    def is_tensor(self, value):
        return type(value) is Sparse

    def features_of(self, x):
        return x.features

    def coordinates_of(self, x):
        return x.coords


class Around:
    """A program's own object around a sparse tensor."""

    def __init__(self, x, **more):
        self.x = x
        vars(self).update(more)

    def __repr__(self):
        return f"{type(self).__name__}({vars(self)})"


Pair = collections.namedtuple("Pair", "first second")
TENSORS = Framework()


def tensors_of(value):
    return TENSORS if isinstance(value, (Sparse, torch.Tensor)) else None


def call(*args, reads=(), **kwargs):
    return call_of(args, kwargs, tensors_of, set(reads))


def refused(why):
    return pytest.raises(Refusal, match=rf"\[{why.name}\]")


class TestCalls:
    def test_the_sparse_tensor_is_found_wherever_it_is(self):
        x = Sparse()
        for given in (x, [x], (x,), {"x": x}, {"a": {"x": x}}, Around(x), {"o": Around(x)}, [1, {"x": [2], "y": x}]):
            assert call(given).x is x
        assert call(1, "a") is None and call(torch.ones(2)) is None

    def test_two_of_them_are_too_many(self):
        with refused(Why.GRAPH_SEVERAL):
            call(Sparse(), y=Sparse())
        x = Sparse()
        assert call(x, x).x is x

    @pytest.mark.parametrize(
        "one, other", [(1, 2), (1, True), (1, 1.0), ("a", "b"), (None, 0), ([1], (1,)), ([1], [1, 1])], ids=str
    )
    def test_values_tell_calls_apart(self, one, other):
        x = Sparse()
        assert call(x, one).constants == call(x, one).constants != call(x, other).constants
        assert call(x, a=one).constants != call(x, a=other).constants
        assert call(x, a=one).constants != call(x, b=one).constants

    def test_of_tensors_only_the_kind_does(self):
        x = Sparse()
        assert call(x, torch.ones(2)).constants == call(x, torch.zeros(2)).constants
        others = torch.ones(2, 1), torch.ones(2).half(), torch.ones(2).requires_grad_(), torch.ones(5)
        for other in others:
            assert call(x, torch.ones(2)).constants != call(x, other).constants
        assert len({call(x, other).constants for other in others}) == len(others)

    @pytest.mark.parametrize("around", [lambda t: t, lambda t: [t], lambda t: {"t": t}], ids=["alone", "list", "dict"])
    def test_their_rows_do_not_where_these_are_those_of_the_sparse_tensor(self, around):
        calls = []
        for n_rows, size in ((3, 3), (4, 4), (4, 3)):
            x = Sparse()
            x.features = torch.zeros(n_rows, 2)
            calls.append(call(x, around(torch.ones(size, 7)), reads=[((1,), "t")]).constants)
        assert calls[0] == calls[1] != calls[2]

    def test_of_dictionaries_only_what_is_read(self):
        x = Sparse()

        def of(entry, reads=()):
            return call({"x": x, "a": entry}, reads=reads).constants

        assert of(1) == of(2) == of(object())
        read = [((0,), "a")]
        assert of(1, read) == of(1, read) != of(2, read)
        assert call({"x": x}, reads=read).constants != of(1, read)
        with refused(Why.GRAPH_OBJECT):
            of(object(), read)
        assert read_constants({(0,): {"a": {1: 2}}}, set(read), 5) == (((0,), "a", dict),)
        assert read_constants({}, set(read), 5) == ()
        assert read_constants({(0,): {}}, set(read), 5) == (((0,), "a", "missing"),)

    def test_dictionaries_and_tensors_that_lie_deeper(self):
        inner, value, deep = {"c": 1}, torch.ones(1), torch.zeros(1)
        dicts, parts = other_inputs(({"a": [inner, value]},), {"k": (deep,), "n": 3})
        assert dicts[0, "a", 0] is inner and set(dicts) == {(0,), (0, "a", 0)}
        assert parts == {(0, "a", 1): value, ("k", 0): deep}
        made = call({"x": Sparse(), "a": [inner, value]})
        assert made.dicts[0, "a", 0] is inner and made.parts[0, "a", 1] is value

    def test_one_object_in_two_places(self):
        x, own = Sparse(), {"a": 1}
        with refused(Why.GRAPH_TWO_PLACES):
            call(x, own, own)
        with refused(Why.GRAPH_TWO_PLACES):
            call({"x": x, "l": own, "m": [own]})
        call(x, own, dict(own))

    def test_what_has_a_value(self):
        """Functions and classes that hold no state."""
        assert constant([1, "a"], 5) == (list, ((int, 1), (str, "a")))
        for value in (torch.relu, torch.nn.ReLU, copy.copy, math.sqrt, lambda x: x, Sparse):
            assert constant(value, 5) == (type(value), value) != constant(torch.tanh, 5)

    @pytest.mark.parametrize(
        "value",
        [object(), {1}, [].append, torch.nn.ReLU(), functools.partial(torch.relu), (lambda own: lambda: own)(1)],
        ids=["an object", "a set", "a method", "a module", "partial", "a closure"],
    )
    def test_what_has_none(self, value):
        with refused(Why.GRAPH_OBJECT):
            constant(value, 5)

    def test_attributes_of_an_object_around_it(self):
        x = Sparse()
        one = call(Around(x, scale=2, inside={"a": 1}, own=torch.ones(2))).constants
        assert one == call(Around(x, scale=2, inside={"a": 5}, own=torch.zeros(3))).constants
        assert one != call(Around(x, scale=3, inside={"a": 1}, own=torch.ones(2))).constants
        with refused(Why.GRAPH_ATTRIBUTE):
            call(Around(x, odd={1, 2}))
        value = torch.ones(2)
        assert call(Around(x, own=value)).parts[0, "own"] is value
        features = call(Around(x, own=x.features))
        assert (0, "own") not in features.parts
        assert features.constants != call(Around(x, own=value)).constants

    def test_inputs_by_path(self):
        x, own, value = Sparse(), {"a": 1}, torch.ones(3)
        made = call(x, own, value)
        assert made.input_at(()) is x and made.input_at((1,)) is own and made.input_at((2,)) is value
        with refused(Why.GRAPH_RETURNS_UNKNOWN):
            made.input_at((7,))
        assert {id(one) for one in (x, x.features, x.coords, own, value)} == set(made.inputs_by_id(TENSORS))


def mapped(value, lookup=None, memo=None):
    more = () if lookup is None else (lookup,)
    return map_structure(TENSORS, value, lambda t: ("tensor", t), lambda x: ("sparse", x), *more, memo=memo)


class TestStructures:
    def test_every_kind(self):
        x, t = Sparse(), torch.ones(1)
        given = {"a": [t, 1], "b": (x, "s"), "c": Pair(t, None), "d": collections.OrderedDict(e=x)}
        found = mapped(given)
        assert found == {
            "a": [("tensor", t), 1],
            "b": (("sparse", x), "s"),
            "c": Pair(("tensor", t), None),
            "d": collections.OrderedDict(e=("sparse", x)),
        }
        assert type(found["c"]) is Pair and type(found["d"]) is collections.OrderedDict
        around = mapped(Around(x, scale=2, t=t))
        assert type(around) is Around and vars(around) == {"x": ("sparse", x), "scale": 2, "t": ("tensor", t)}

    def test_what_is_one_object_stays_one(self):
        inner = [torch.ones(1)]
        found = mapped([inner, inner, [inner[0]]])
        assert found[0] is found[1] is not found[2] and found[0][0] is found[2][0]
        memo = {}
        assert mapped(inner, memo=memo) is mapped(inner, memo=memo)

    def test_what_is_looked_up_is_not_looked_into(self):
        t, other = torch.ones(1), torch.zeros(1)
        found = mapped([t, other, 3], lambda value: "found" if value is t else MISSING)
        assert found == ["found", ("tensor", other), 3]
        assert mapped(3, lambda value: "found") == "found"

    @pytest.mark.parametrize("value", [object(), {1}, types.SimpleNamespace(a=1), Around(1), collections.deque()])
    def test_other_objects(self, value):
        with refused(Why.GRAPH_RETURNS_OBJECT):
            mapped([value])

    @pytest.mark.parametrize(
        "value, there",
        [
            (1, True),
            (0.5, True),
            (True, False),
            ("a", False),
            (None, False),
            (torch.ones(1), False),
            ([torch.ones(1), [2]], True),
            ({"a": ()}, False),
            ({"a": {"b": 1}}, True),
            (Pair("a", 2), True),
            (torch.Size([2]), True),
            (collections.OrderedDict(a=1), True),
        ],
        ids=str,
    )
    def test_numbers(self, value, there):
        assert has_numbers(value, TENSORS.is_tensor) == there
        assert has_numbers(Around(Sparse(), inside=value), TENSORS.is_tensor) == there
        assert not has_numbers(Sparse(), TENSORS.is_tensor)


class TestComparison:
    def check(self, value, other, *inputs):
        x = Sparse()
        made = call(x, *inputs)
        StructureCheck(made.inputs_by_id(TENSORS), TENSORS.is_tensor)("it", value, other)

    @pytest.mark.parametrize(
        "value, other",
        [
            (1, 1),
            (float("nan"), float("nan")),
            ([1, "a"], [1, "a"]),
            ({"a": (1,)}, {"a": (1,)}),
            (torch.ones(1), torch.zeros(2)),
            (Sparse(), Sparse()),
            (Around(Sparse(), n=1), Around(Sparse(), n=1)),
        ],
        ids=str,
    )
    def test_alike(self, value, other):
        self.check(value, other)

    @pytest.mark.parametrize(
        "value, other, why",
        [
            (1, 2, Why.GRAPH_OUTPUT_VALUE),
            (1, True, Why.GRAPH_OUTPUT_VALUE),
            (float("nan"), 1.0, Why.GRAPH_OUTPUT_VALUE),
            ([1], (1,), Why.GRAPH_OUTPUT_CLASS),
            ([torch.ones(1)], [Sparse()], Why.GRAPH_OUTPUT_CLASS),
            ([1, 2], [1], Why.GRAPH_OUTPUT_KEYS),
            ({"a": 1}, {"b": 1}, Why.GRAPH_OUTPUT_KEYS),
            ({"a": [3]}, {"a": [4]}, Why.GRAPH_OUTPUT_VALUE),
            (Around(Sparse(), n=1), Around(Sparse(), n=2), Why.GRAPH_OUTPUT_VALUE),
        ],
        ids=str,
    )
    def test_other(self, value, other, why):
        with refused(why):
            self.check(value, other)

    def test_what_is_one_object_is_one_in_both(self):
        one = [1]
        self.check([one, one], [[2 - 1]] * 2)
        for value, other in (([one, one], [[1], [1]]), ([[1], [1]], [one, one])):
            with refused(Why.GRAPH_OUTPUT_SHARED):
                self.check(value, other)

    def test_inputs_are_themselves(self):
        own = {"a": 1}
        self.check([own], [own], own)
        for value, other in (([own], [dict(own)]), ([dict(own)], [own])):
            with refused(Why.GRAPH_OUTPUT_OWNER):
                self.check(value, other, own)
        given, made = torch.ones(1), torch.zeros(1)
        self.check([given], [given], given)
        self.check([made], [given], given)  # tensors are compared by their bits
        with refused(Why.GRAPH_OUTPUT_OWNER):
            self.check([given], [made], given)


class TestOutputs:
    def spec(self, made, function):
        reads = set()
        return OutputSpec.of(made, function, lambda: Sparse(), reads), reads

    def test_what_is_returned_and_written(self):
        x, t = Sparse(), torch.ones(2)
        batch = {"x": x, "kept": t, "size": 4}
        made = call(batch)

        def model(inputs):
            inputs["out"] = [inputs["x"], inputs["kept"]]
            return {"made": torch.zeros(1), "same": inputs}

        spec, reads = self.spec(made, model)
        assert set(batch) == {"x", "kept", "size"} and reads <= {((0,), "x"), ((0,), "kept")}
        assert dict.__len__(spec.value["same"]) == 0  # nothing of the call is kept alive
        assert list(spec.written) == [(0,)] and list(spec.written[0,]) == ["out"]
        assert spec.values() == [spec.value, spec.written[0,]["out"]]
        lookup = spec.input_lookup(made)
        assert lookup(spec.x) is x and lookup(3) is MISSING and lookup(spec.value["same"]) is batch
        assert spec.passthrough(spec.x) is spec.x and spec.passthrough(object()) is MISSING
        seen, inside = [], []
        spec.for_each(TENSORS, seen.append, inside.append)
        assert [one for one in seen if one is spec.value["made"]] and not inside
        result = spec.write_back(made, lambda value: map_structure(TENSORS, value, lambda t: t, lambda y: y, lookup))
        assert result["same"] is batch and batch["out"][0] is x and result["made"] is spec.value["made"]
        assert spec.of_call(made, result, TENSORS).values() == [result, batch["out"]]


ROWS = torch.zeros(5, 6)


@pytest.mark.parametrize(
    ("tensors", "shared"),
    [
        (ROWS.split(2, 1), False),
        ((ROWS[:, :4], ROWS[:, 3:]), True),
        ((ROWS[:, :4], ROWS[:, 4]), False),
        ((ROWS, ROWS), False),  # one tensor
        ((ROWS, ROWS[:]), True),
        ((ROWS, ROWS.view(-1, 2, 3)), True),
        ((ROWS[:2], ROWS[2:]), False),
        ((ROWS[:3], ROWS[2:]), True),
        ((ROWS.view(5, 2, 3)[:, 0], ROWS.view(5, 2, 3)[:, 1]), False),
        ((ROWS.t(), ROWS[:, 0]), True),
        ((ROWS[:1, :2], ROWS[:1, 2:]), False),
        ((ROWS[0], ROWS[1]), False),
        ((ROWS.sum(), ROWS), False),
        ((ROWS[:0], ROWS), False),
        ((ROWS.clone(), ROWS, ROWS[:, 0].clone()), False),
    ],
)
def test_memory_that_tensors_share(tensors, shared):
    assert share_memory(list(tensors)) == share_memory(list(tensors)[::-1]) == shared
