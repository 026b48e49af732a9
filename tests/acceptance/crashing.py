"""A process of checks that dies, hangs or answers, as it is told."""

import json
import os
import sys
import time

from sparse_bridge.tools.harness.processes import channel, write

if __name__ == "__main__":
    answers = channel()
    for line in sys.stdin:
        check = json.loads(line)["check"]
        if check == "crash":
            print("RuntimeError: an illegal memory access", file=sys.stderr)
            os._exit(9)
        if check == "hang":
            time.sleep(600)
        write(answers, name=check, status="passed", detail="fine", figures={}, seconds=0.0)
        write(answers, done=True)
