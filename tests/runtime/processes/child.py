"""A child of `test_children`: it lives for some time, and ends well with an answer or badly with a complaint."""

import sys
import time

import msgspec


class Life(msgspec.Struct):
    seconds: float
    complaint: str = ""
    status: int = 0


if __name__ == "__main__":
    life = msgspec.json.decode(sys.argv[1], type=Life)
    time.sleep(life.seconds)
    print(life.complaint, file=sys.stderr)
    print("done", end="")
    sys.exit(life.status)
