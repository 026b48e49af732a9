"""Conditions that do nothing but end a call with an error: those that a replay may leave out."""

from __future__ import annotations

import ast
import itertools

from ...refusals import Why
from .expressions import Expressions
from .tags import COUNTS, constant


class Checks(Expressions):
    """Expressions of one function, and its checks."""

    def check(self, test: ast.expr, passes: bool) -> None:
        """A condition that ends the call with an error unless it is `passes`. A capture has seen it for as many rows as
        there is memory for, and no graph serves an input without rows: replays are right where fewer rows pass, too."""
        known, fewer = dict(self.problems), self._passes_for_fewer(test, passes)
        self.branch(test)
        if fewer:
            new = self.problems.keys() - known.keys()
            choice = Why.GRAPH_CHOOSES_BY_ROWS.name
            self.problems = known | {key: self.problems[key] for key in new if key[0] != choice}

    def _passes_for_fewer(self, test: ast.expr, passes: bool) -> bool:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self._passes_for_fewer(test.operand, not passes)
        if isinstance(test, ast.BoolOp):
            return all(self._passes_for_fewer(part, passes) for part in test.values)
        if not isinstance(test, ast.Compare):
            counts, steps = self._counted(test)
            return not counts or not (steps or isinstance(test, ast.BinOp))
        sides = [test.left, *test.comparators]
        pairs = zip(itertools.pairwise(sides), test.ops, strict=True)
        return all(self._compared_for_fewer(*pair, op, passes) for pair, op in pairs)

    def _compared_for_fewer(self, left: ast.expr, right: ast.expr, op: ast.cmpop, passes: bool) -> bool:
        (rows, steps), (others, more_steps) = self._counted(left), self._counted(right)
        if steps or more_steps:
            return False
        if rows and others:
            return isinstance(op, (ast.Eq, ast.NotEq))  # the same rows in two places
        if not (rows or others):
            return True
        limit, below = (right, (ast.Lt, ast.LtE)) if rows else (left, (ast.Gt, ast.GtE))
        above = (ast.Gt, ast.GtE) if rows else (ast.Lt, ast.LtE)
        return constant(limit) == 0 or isinstance(op, below if passes else above)

    def _counted(self, node: ast.expr) -> tuple[bool, bool]:
        """Whether an expression follows from rows, and whether it does in steps."""
        known, tags = dict(self.problems), self.of(node)
        steps, self.problems = len(self.problems) > len(known), known
        return bool(tags & COUNTS), steps
