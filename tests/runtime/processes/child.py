"""A child of `test_children`, which lives for some time.

It ends well with an answer or badly with a complaint.
"""

import os
import sys
import time

import msgspec


class Life(msgspec.Struct):
    seconds: float
    complaint: str = ""
    status: int = 0


def live(data: bytes) -> bytes:
    life = msgspec.json.decode(data, type=Life)
    time.sleep(life.seconds)
    print(life.complaint, file=sys.stderr, flush=True)
    if life.status:
        os._exit(life.status)
    return b"done"


def switch_interval(data: bytes) -> bytes:
    return str(sys.getswitchinterval()).encode()


def sleep(data: bytes) -> int:
    time.sleep(float(data))
    return 0
