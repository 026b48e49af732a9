"""A numpy array where a tensor belongs: one typed error, which says what is expected and how to get it."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch

import sparse_bridge
from sparse_bridge.core import functional
from sparse_bridge.errors import TensorExpectedError
from tests.adapters.flex_gemm import test_bad_input

from .programs import APIS, CASES, PARAMETERS, Program, Tensors

MESSAGE = r"torch\.Tensor expected for [\w ]+, got numpy\.ndarray; torch\.from_numpy\([\w ]+\) makes one"


def arrays(program: Program, module: Any, tensors: Tensors) -> list[str]:
    """The tensors in whose place an array gave no error."""
    served = []
    for name, tensor in tensors.items():
        if name in PARAMETERS:
            continue
        try:
            program(module, **{**tensors, name: tensor.numpy()})()
        except Exception as error:
            assert type(error) is TensorExpectedError, (name, type(error), error)
            assert re.search(MESSAGE, str(error)), error
        else:
            served.append(name)
    return served


@pytest.mark.parametrize(("api", "name"), [case for case in CASES if case[0] != "torch_geometric"])
def test_arrays_in_programs(api, name):
    enter, programs = APIS[api]
    program, tensors = programs[name]
    given = {key: torch.nn.Parameter(value) if key in PARAMETERS else value for key, value in tensors.items()}
    with enter() as module:
        assert arrays(program, module, given) == []
