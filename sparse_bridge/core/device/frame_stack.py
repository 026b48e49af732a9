"""Where Python keeps its frames.

CPython 3.11 and newer keep a thread's frames one after another in chunks of 16 KiB or more. A call
that does not fit into the rest of a chunk takes another one from the system and gives it back on
return: two to ten microseconds. Where a program's own frames leave its layers at the end of a
chunk, hundreds of calls of a scene do that, and inference takes the host up to half as long again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ONE_CALL = 1 << 12  # slots of eight bytes; an ordinary chunk has 2,048
PROGRAM = 1 << 17


def with_room(function: Callable[..., Any], slots: int = ONE_CALL) -> Callable[..., Any]:
    """`function` in a chunk of its own, with about `slots` left for the frames of what it calls.

    slots: more than any chunk in use has left, a power of two.
    """

    def enter(*args: Any, **more: Any) -> Any:
        return function(*args, **more)

    # A chunk has room for a power of two, the smallest that is more than the frame asks for.
    enter.__code__ = enter.__code__.replace(co_stacksize=slots)
    return enter
