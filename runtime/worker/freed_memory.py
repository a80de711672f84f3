"""Memory that a worker has freed goes back to the system when an order has ended.

Each order has a thread of its own, and its process groups have some. glibc gives threads heaps, of which there are
many, and keeps in each what is freed there: without this, a worker takes more and more memory, while it uses no more.
"""

import ctypes
import sys

_LIBRARY = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


def give_back() -> None:
    """Return to the system what nobody uses. Nothing happens where the C library is not glibc."""
    trim = getattr(_LIBRARY, "malloc_trim", None)
    if trim is not None:
        trim(0)
