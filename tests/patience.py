"""How long a test waits for what an idle machine does in a second or a few: nearly until pytest ends the test.

A machine that is busy with other things takes ten times as long at times. What hangs fails all the same. Slow tests are
ended later.
"""

SECONDS = 280
HEARTBEATS = ("--heartbeat-timeout", "30")
"""Options of `train`: no worker is given up that has got no core for a while."""
