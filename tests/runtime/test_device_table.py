"""`python -m benchmarks.device` on a CPU, in its shortest form: the same command that is run on GPUs."""

import json
import re
import subprocess
import sys

SHORT = ("--dtypes", "bf16", "--blocks", "2", "--width", "64", "--context", "32", "--batch", "2", "--iterations", "3",
         "--rounds", "1")


def test_one_table_of_all_that_is_measured():
    done = subprocess.run([sys.executable, "-m", "benchmarks.device", "--device", "cpu", "--json", *SHORT],
                          check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert re.match(r"\d{4}-\d\d-\d\d: .* CPU cores .*, 4 workers, gloo, torch ", table["title"])
    rows = table["bf16"]
    settles = not rows["settled, three workers"].startswith("does not pay")  # ops this short are noise: the run decides
    for phase in ("all four workers", "at once, three workers", *["settled, three workers"] * settles):
        planned, measured = (float(re.search(rf"{word} (\S+) ms", rows[phase])[1]) for word in ("planned", "measured"))
        assert 0 < planned < 20 * measured, "a second for each op, as the file to be profiled says, is far off"
    assert "predicted" in rows["settled, three workers"]
    assert float(rows["layers moved"].removesuffix(" MB")) > 0 or not settles
    assert {"F of a stage", "pause after a SIGKILL", "memory, activation", "memory, stash"} <= set(rows)
