"""AMD's instruction pseudo-code, translated to C.

`Translator(text).run()` turns one instruction's text ("D0.f32 = S0.f32 + S1.f32") into C statements
over the raw bits of operands and result: S0, S1, S2, D0; SCC and EXEC; vcc, the mask of carries in;
cb, the carry or comparison bit of this lane; l, the lane. One pass: the parser returns typed C
expressions. Halves live in C floats and are rounded after every operation; integers narrower than
32 bits are cut to their width after every operation.
"""

from .replaced import REPLACE
from .statements import Translator
from .values import PcodeError

__all__ = ["REPLACE", "PcodeError", "Translator"]
