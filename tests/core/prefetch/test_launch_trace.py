"""Host code that is traced: the same numbers, or guards that fail."""

from __future__ import annotations

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_bridge.core.prefetch.traces import NoOperations
from sparse_bridge.kernels.runtime.launch import cdiv, power_of_2
from sparse_bridge.kernels.runtime.launch_trace import Trace
from sparse_bridge.kernels.runtime.parts import Part, memory_for, octave_step
from sparse_bridge.kernels.runtime.symbolic import Sym, largest
from sparse_bridge.refusals import Refusal

CPU = torch.device("cpu")


def repeated(work, *numbers):
    """`work(trace, *numbers)` as a function of the numbers, traced of these. It returns what is
    there when the host would wait, and what follows from that."""
    trace = Trace(CPU)
    symbols = [trace.number(one) for one in numbers]
    with NoOperations():
        given, result = work(trace, *symbols)
        trace.waits(given, [])
        traced = trace.traced(result)
    first, second = traced.first.loaded(), traced.second.loaded()

    def repeat(*others):
        found = first(None, (), [0, *others])
        return None if found is None else (found[0], second(found[1], (), [])[0])

    return repeat


def sizes(trace, a, b):
    found = (
        a + b,
        a - b,
        3 * a,
        -a,
        cdiv(a, 7),
        a % b,
        1 << (b % 5),
        power_of_2(a),
        octave_step(a, 4),
        largest([a, b, 12]),
        max(a, b),
        a.bit_length() if type(a) is Sym else 0,
        a << 2,
    )
    return found, ()


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 40), st.data())
def test_numbers(a, b, data):
    """Either a guard fails or all is as Python computes it."""
    repeat = repeated(sizes, a, b)
    near = [data.draw(st.integers(max(1, one - 9), one + 9)) for one in (a, b)]
    for x, y in ((a, b), near, (near[0], b), (2 * a, 2 * b)):
        found = repeat(x, y)
        expected = list(sizes(None, x, y)[0])
        expected[11] = x.bit_length()
        assert (found is None and (x, y) != (a, b)) or found == (tuple(expected), ())


@pytest.mark.parametrize(
    "work",
    [
        lambda trace, n: ((1 if n < 10 else 2,), ()),
        lambda trace, n: (({7: 1}.get(n, 2),), ()),
        lambda trace, n: ((list(range(20))[n],), ()),
        lambda trace, n: ((int(n),), ()),
        lambda trace, n: ((1 if n - 7 else 2,), ()),
        lambda trace, n: ((n == 7,), ()),
    ],
    ids=["compared", "hashed", "an index", "a number", "a truth", "equal"],
)
def test_what_is_asked_becomes_a_guard(work):
    repeat = repeated(work, 7)
    assert repeat(7) == (work(None, 7)[0], ())
    assert repeat(15) is None


@pytest.mark.parametrize(
    "work",
    [
        lambda trace, n: (torch.zeros(3), ()),
        lambda trace, n: (n / 2, ()),
        lambda trace, n: (object(), ()),
        lambda trace, n: (memory_for(n, CPU).narrow(0, 1, 2), ()),
    ],
    ids=["an operation of torch", "a fraction", "another object", "a slice"],
)
def test_what_cannot_be_repeated(work):
    with pytest.raises((Refusal, TypeError)):
        repeated(work, 7)


def test_memory_goes_when_nothing_needs_it(monkeypatch):
    """Neither its address, nor numbers that were sent and hold it; the slice that is returned
    stays."""
    alive = []

    def seen(size, device, fill=None):
        made = torch.full((size,), 0 if fill is None else fill, dtype=torch.int32)
        alive.append(weakref.ref(made))
        return made

    def sent(values):
        return torch.tensor(values)

    def state(*_):
        states.append([one() is not None for one in alive])

    states: list[list[bool]] = []

    def work(trace, n):
        a, b, c = [trace.call(seen, (n, CPU), (n,), torch.int32) for _ in range(3)]
        trace.run(state, a.data_ptr() + 4)
        records = trace.call(sent, ([b.data_ptr(), n],), (2,), torch.int64)
        trace.run(state, b.data_ptr())
        trace.run(state, records.data_ptr())
        trace.run(state, 3)
        return (c[: n - 1],), (Part(c, 1, (2,)),)

    (first,), (part,) = repeated(work, 5)(9)
    assert states == [[True] * 3, [False, True, True], [False, True, True], [False, False, True]]
    assert first.shape == (8,) and part.memory.shape == (9,) and part.view().tolist() == [0, 0]
