"""The other end of `test_processes`: does what each message asks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from sparse_bridge.tools.harness.processes import channel, write

if __name__ == "__main__":
    stream = channel()
    print("noise on standard output")
    for line in sys.stdin:
        message = json.loads(line)
        if message["do"] == "hang":
            helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            write(stream, helper=helper.pid)
            time.sleep(600)
        if message["do"] == "abort":
            os.abort()
        if message["do"] == "raise":
            raise ValueError("as asked")
        write(stream, echo=message, arguments=sys.argv[1:], set=os.environ.get("HARNESS"))
