"""Random programs give by replays what their layers give: parts in a row of random layers and of what stands beside
layers, in inference and training, over scenes of random boxes, rows and batch items.

`SPARSE_BRIDGE_TEST_PROGRAMS=200` makes programs until so many of each framework were replayed, and
`SPARSE_BRIDGE_TEST_SEED=17` one alone. A failing test prints the seed and all that is in the program.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from sparse_bridge import policy

from .graph_sizes import graphs_of
from .random_programs.compare import replays_of
from .random_programs.program import Program
from .random_programs.scenes import NAMES, framework

pytestmark = pytest.mark.emulated
SEED = os.environ.get("SPARSE_BRIDGE_TEST_SEED")
PROGRAMS = int(os.environ.get("SPARSE_BRIDGE_TEST_PROGRAMS", "1"))


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", NAMES)
def test_random_programs(device, errors_survived, rules, nothing_learnt, name, trains):
    rules.set(policy, LEAST_LAYERS=1, CAPTURE=policy.CAPTURE._replace(skip_first=1))
    wrong, words, replayed = [], Counter(), Counter()
    for seed in [int(SEED)] if SEED else range(4 * PROGRAMS):
        with framework(name) as module:
            program = Program(module, name, trains, seed, device)
            try:
                with graphs_of(512, watched=program.watched):
                    hits, _ = replays_of(program)
            except AssertionError as error:
                wrong.append(f"{program}\n{error}")
                print(wrong[-1])
                continue
        for word in (*(+program.words), "programs"):
            words[word] += 1
            replayed[word] += hits > 0
        if replayed["programs"] == PROGRAMS:
            break
    print(f"{name}, {'training' if trains else 'inference'}: programs that were replayed, of all, by what is inside")
    print(", ".join(f"{word} {replayed[word]}/{words[word]}" for word in sorted(words)))
    assert not wrong, "\n\n".join(wrong)
    assert SEED is not None or replayed["programs"] == PROGRAMS
