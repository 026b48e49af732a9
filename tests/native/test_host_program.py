"""Steps of recorded host code in the compiled helper: Python's numbers or none, and no step that
reads what is not there."""

from __future__ import annotations

import contextlib
import gc
import operator
import random
import sys
import weakref
from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_bridge.kernels.runtime.host_program import OPCODES, Steps
from tests.fake_driver import Driver
from tests.native.recording import helper, in_threads, values_of

BEYOND = 1 << 63
EDGES = (0, 1, -1, 7, -7, 61, 62, 63, 64, 1 << 32, 1 << 62, BEYOND - 1, -BEYOND)
NUMBERS = st.sampled_from(EDGES) | st.integers(-BEYOND, BEYOND - 1) | st.integers(-99, 99)
ARITHMETIC = {
    "ADD": operator.add,
    "SUB": operator.sub,
    "MUL": operator.mul,
    "FLOORDIV": operator.floordiv,
    "MOD": operator.mod,
    "SHL": operator.lshift,
    "MAX": max,
    "NEG": lambda a, _: -a,
    "BITS": lambda a, _: a.bit_length(),
}
GUARDS = {
    "EQ": operator.eq,
    "NE": operator.ne,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
}


def described(*steps, numbers=(), objects=(), carried=()):
    """Steps of (kind, *words)."""
    words = array("i")
    for kind, *operands in steps:
        words.extend([OPCODES.index(kind) | len(operands) << 8, *operands])
    initial, places = array("q", numbers).tobytes(), array("i", carried).tobytes()
    return Steps(words.tobytes(), initial, tuple(objects), places)


def program(*steps, **given):
    helper()
    return described(*steps, **given).loaded()


@pytest.mark.parametrize("kind", ARITHMETIC)
def test_numbers_are_those_of_python(kind):
    operands = (0,) if kind in ("NEG", "BITS") else (0, 1)
    run = program((kind, 2, *operands), ("INT", 0, 2), ("RETURN", 0), numbers=[0] * 3, objects=[0])

    @given(NUMBERS, NUMBERS)
    def check(a, b):
        found = run(None, (), [a, b])
        if kind == "SHL" and not 0 <= b < 62:
            assert found is None
            return
        expected = ARITHMETIC[kind](a, b) if b or kind not in ("FLOORDIV", "MOD") else None
        if expected is None or not -BEYOND <= expected < BEYOND:
            assert found is None
        elif found is None:
            assert (kind, a, b) == ("MOD", -BEYOND, -1)
        else:
            assert found[0] == expected

    check()


@pytest.mark.parametrize("kind", GUARDS)
def test_guards(kind):
    runs = [program((kind, 0, 1, outcome), ("RETURN", 0), numbers=[0, 0], objects=[kind]) for outcome in (0, 1)]
    for a in EDGES:
        for b in EDGES:
            holds = [run(None, (), [a, b]) is not None for run in runs]
            assert holds == [not GUARDS[kind](a, b), GUARDS[kind](a, b)]


@pytest.mark.parametrize("seed", range(4))
def test_words_at_random(seed):
    """They are refused, or run without reading beyond what is there."""
    draw, made = random.Random(seed), 0
    for _ in range(8_000):
        words = array("i")
        for _ in range(draw.randint(0, 5)):
            count = draw.choice([0, 1, 2, 3, 3, 4, 5, -1, 70, 100])
            words.append(draw.randint(0, len(OPCODES) + 1) | count << 8)
            words.extend([draw.choice([0, 1, 2, 3, -1, -2, 4]) for _ in range(max(0, count))])
            if draw.random() < 0.1:
                words.append(draw.randint(-(1 << 31), (1 << 31) - 1))
        n_numbers, carried = draw.randint(0, 4), draw.choice([0, 0, 3, 6, 4])
        places = array("i", [draw.choice([0, 1, 2, -1, 7]) for _ in range(carried)])
        objects = tuple(draw.choice([None, len, [1, 2], 3, (4,)]) for _ in range(3))
        numbers = array("q", [draw.choice(EDGES) for _ in range(n_numbers)])
        parts = words.tobytes(), numbers.tobytes(), objects, places.tobytes()
        try:
            run = helper().HostProgram(*parts)
        except ValueError:
            continue
        made += 1
        state = None
        for _ in range(3):  # from no state, and from its own, which may have been used before
            try:
                found = run(state, (), [])
            except (TypeError, ValueError, OverflowError, IndexError, AttributeError):
                break
            state = None if found is None else found[1]
    assert made > 100


def test_what_is_handed_in():
    run = program(("INT", 0, 1), ("RETURN", 0), numbers=[0] * 9, objects=[0])
    assert run(None, (), [1, -BEYOND])[0] == -BEYOND
    with pytest.raises(OverflowError):
        run(None, (), [1, BEYOND])
    numbers = [1] * 9

    class Emptying:
        def __index__(self):
            numbers.clear()
            return 1

    numbers[0] = Emptying()
    for handed in (numbers, [1.0], [None]):
        with pytest.raises(TypeError, match="whole number"):
            run(None, (), handed)
    for wrong in ((1, (), []), (None, (1, 2), []), (None, (), [1] * 10)):
        with pytest.raises(ValueError, match="does not fit"):
            run(*wrong)


def test_states():
    """One that goes on gives up what it held, and then serves nobody."""
    first = program(("ADD", 1, 0, 0), ("RETURN", 0), numbers=[0, 0], objects=[None])
    carried = (1, 0, 0, 0, 1, 0)
    second = program(
        ("COMMIT",), ("DROP", 0), ("INT", 1, 0), ("RETURN", 1), numbers=[0], objects=[None, None], carried=carried
    )
    held = set()
    held_at = weakref.ref(held)
    _, state = first(None, (held,), [4])
    del held
    assert held_at() is not None
    result, _ = second(state, (), [])
    assert result == 8 and held_at() is None
    _, small = program(("RETURN", 0), objects=[0])(None, (), [])
    for other in (state, small):  # used before; of another program
        with pytest.raises(ValueError, match="state of another program"):
            second(other, (), [])
    for other in (None, 3):
        with pytest.raises(ValueError, match="does not fit"):
            second(other, (), [])


def test_an_exception_on_the_way_leaves_nothing_behind():
    calls = [0]

    def fails(*_):
        calls[0] += 1
        if calls[0] % 3 == 0:
            raise KeyError
        return []

    mark, carried = object(), (1, 2, 0)
    first = program(
        ("LIST", 2, 0, 1),
        ("CALL", 3, 4, 2, 0),
        ("LAUNCH", 4, 0, -1, -3),
        ("GT", 0, 1, 1),
        ("TUPLE", 2, 2, 3),
        ("RETURN", 2),
        numbers=[0, 5],
        objects=[None, mark, None, None, fails],
    )
    second = program(("COMMIT",), ("CALL", -1, 1, 0), ("RETURN", 0), objects=[None, fails], carried=carried)

    def run(number):
        try:
            found = first(None, (mark,), [number])
            if found is not None:
                second(found[1], (), [])
        except (KeyError, OverflowError):
            pass

    before = sys.getrefcount(mark), sys.getrefcount(fails)
    for number in range(3_000):
        run((3, 9, BEYOND)[number % 3 if number % 7 else 0])
    assert (sys.getrefcount(mark), sys.getrefcount(fails)) == before
    for wrong in ([("INT", 9, 0)], [("RETURN", 0), ("CALL", -1)]):
        with pytest.raises(ValueError, match="no steps"):
            program(*wrong, numbers=[0], objects=[mark])
    assert sys.getrefcount(mark) == before[0]


@pytest.mark.parametrize("held", ["itself", "a dictionary"])
def test_a_program_that_holds_itself_is_collected(held):
    """A tuple cannot be emptied, so the program has to let go of it."""

    class Mark:
        pass

    mark, around = Mark(), {}
    gone = weakref.ref(mark)
    mark.run = around["run"] = program(("RETURN", 0), objects=[mark] if held == "itself" else [around, mark])
    del mark, around
    gc.collect()
    assert gone() is None


def test_a_launch_takes_what_its_launcher_takes():
    """The same values arrive, or both raise."""
    kinds, arrived = "Pilbhfdx", []
    driver = Driver(lambda launch: arrived.append(values_of(launch, kinds)) or 0)
    launcher = helper().Launcher(driver.address, 7, 128, 0, kinds)
    plain = [1, 0, 5, 255, -128, 65_535, 256, (1 << 32) - 1, 1 << 32, BEYOND - 1, -BEYOND, -1]
    others = [1.5, True, None, torch.zeros(3), "s", 1 << 70]
    draw, outcomes = random.Random(3), []
    for _ in range(2_000):
        values = [draw.choice(draw.choices((others, plain[:5], plain), (10, 80, 10))[0]) for _ in kinds]
        numbers, objects, words = [1, 2, 3, 9], [launcher], [0, 0, 1, 2, 3]
        for value in values:
            if type(value) is int and -BEYOND <= value < BEYOND:
                words.append(len(numbers))
                numbers.append(value)
            else:
                words.append(-1 - len(objects))
                objects.append(value)
        run = program(("LAUNCH", *words), ("RETURN", 0), numbers=numbers, objects=objects)
        found = []
        for call in (lambda: launcher(1, 2, 3, 9, *values), lambda: run(None, (), [])):  # noqa: B023
            arrived.clear()
            try:
                call()
                found.append(list(arrived))
            except (TypeError, ValueError, OverflowError, AttributeError) as error:
                found.append(type(error))
        assert found[0] == found[1], values
        outcomes.append(isinstance(found[0], list))
    assert 200 < sum(outcomes) < 1_800


def test_steps_of_other_constants_are_others():
    def same(a, b):
        steps = [described(("RETURN", 0), objects=[one]) for one in (a, b)]
        return steps[0].same(steps[1])

    tensor = torch.zeros(2)
    assert same(1.5, 1.5) and same(float("nan"), float("nan")) and same(tensor, tensor)
    assert not same(0.0, -0.0) and not same(1, True) and not same(tensor, tensor.clone())


@pytest.mark.timed
def test_threads_that_run_one_program():
    first = program(
        ("CALL", 2, 1, 0),
        ("ADD", 1, 0, 0),
        ("INT", 2, 1),
        ("RETURN", 2),
        numbers=[0, 0],
        objects=[None, lambda _: sum(range(9)), None],
    )
    second = program(("COMMIT",), ("RETURN", 0), objects=[None], carried=(1, 2, 0))
    _, shared = first(None, (first,), [4])
    once = []

    def work(thread):
        wrong = []
        for number in range(1_000 * thread, 1_000 * thread + 1_000):
            result, state = first(None, (first,), [number])
            if result != 2 * number or second(state, (), [])[0] != result:
                wrong.append(number)
        with contextlib.suppress(ValueError):
            once.append(second(shared, (), [])[0])
        return wrong

    assert in_threads(8, work) == [[]] * 8 and once == [8]
