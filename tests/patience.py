"""How long a test waits for what an idle machine does in seconds.

It is nearly until pytest ends the test.

A machine that is busy with other things takes ten times as long at times. What hangs fails all the
same. Slow tests are ended later.
"""

SECONDS = 280
HEARTBEATS = ("--heartbeat-timeout", "30")
"""Options of `train` by which no worker is given up that lacks a core."""
