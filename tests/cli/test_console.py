"""What commands print, where it goes nowhere."""

import subprocess
import sys

from tests.patience import SECONDS
from tests.runtime.running import command_environment

PROGRAM = """
from cli.shared.console import err
print("starts", flush=True)
input()
for number in range(3):
    err.print(f"line {number}")
print("ends")
"""


def test_work_goes_on_where_nobody_reads_stderr_any_more():
    """As that of a run whose mpirun has been killed."""
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, env=command_environment())
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "starts\n"
    process.stderr.close()
    answer, _ = process.communicate("\n", timeout=SECONDS)
    assert answer == "ends\n" and process.returncode == 0
