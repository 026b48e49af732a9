"""What stands in the way of a model's replays: remembered for `report()`, and said once in the log."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from ... import log, policy
from ...refusals import Refusal, Verdict, Why


class Reasons:
    """The reasons of one model.

    attempts: captures, until too many failed.  inconclusive: captures without maps, or with a trial that showed
    nothing.  reason: why a capture failed.  undecided: why the last trial showed nothing.  declined: why the
    last call that might have been replayed was not.
    """

    model: nn.Module

    def forget_reasons(self) -> None:
        """Begin without any."""
        self.attempts = policy.Attempts(policy.CAPTURE_FAILURES)
        self.inconclusive = policy.Attempts(policy.CAPTURE_INCONCLUSIVE)
        self.reason: str | None = None
        self.undecided: str | None = None
        self.declined: str | None = None

    def failed(self, refusal: Refusal) -> None:
        """A trial or a capture ended with it."""
        refusal.__traceback__ = None  # what refused keeps it: its frames would keep the call's tensors
        if refusal.verdict is Verdict.UNDECIDED:
            self.inconclusive.failed()
            self.undecided = str(refusal)
            self._say("undecided", self.undecided)
        else:
            self.attempts.failed()
            if refusal.verdict is Verdict.FINAL:
                self.attempts.give_up()
            self.refuse(str(refusal))

    def refuse(self, reason: str) -> None:
        """Remember why this was not replayed, and say so once."""
        self.reason = reason
        self._say("replay", reason)

    def why(self) -> str | None:
        """What stands in the way of replays, or did."""
        return self.reason or self.undecided or self.declined

    def decline(self, why: Why, *details: Any) -> None:
        """Remember why this call is left alone; calls to come need not be."""
        reason = why.says(*details)
        if reason != self.declined:
            self.declined = reason
            self._say(why.name, reason, logging.INFO)

    def _say(self, topic: str, reason: str, level: int = logging.WARNING) -> None:
        name = type(self.model).__name__
        text = f"{name} is not replayed from a graph: {reason}"
        log.once((topic, type(self).__name__, name), text, level)
