"""Machine code of the kernel: made before the first plan, of the sources as they are, by nobody in the background."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.jobs import uniform_job
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import plan_only
from slipstream.planner.search import compiled
from slipstream.schedules.schedule import Worker
from tests.patience import SECONDS

ROOT = Path(compiled.__file__).parents[2]
"""Where the packages are that copies are made of."""
LINE = "compiling the planner's inner loops"
USE = """
import os
from pathlib import Path
from slipstream.planner.search.compiled import ENTRIES, _entry, ready
import numpy as np

ready(lambda line: print("#", line))
for name in ENTRIES:
    print("random", [int(_entry(name)(np.array([seed], dtype=np.uint64), 1000)) for seed in (1, 2, 3)])
print("children", Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
"""
ENTRY = """
from slipstream.planner.search.kernel.annealing.random import below
from slipstream.planner.search.kernel.jit import jit


@jit
def {name}(random, bound):
    return below(random, bound)
"""
USE_ONCE = """def _use_once() -> None:
    import numpy as np

    for name in ENTRIES:
        _entry(name)(np.zeros(1, dtype=np.uint64), 1000)
"""
OTHER = "random [999, 999, 999]"
"""What both functions answer when the one that they call is another."""


def copy_of_the_installation(folder: Path, *, with_code: bool) -> Path:
    ignored = ("library", *(() if with_code else ("__pycache__",)))
    for room in ("planner", "schedules"):
        shutil.copytree(ROOT / room, folder / "slipstream" / room, ignore=shutil.ignore_patterns(*ignored))
    (folder / "slipstream" / "__init__.py").touch()
    return folder


def small_installation(folder: Path) -> Path:
    """Without machine code, and with little to compile: of each entry nothing is left but that it calls another file.

    All of the kernel takes half a minute; `make` compiles that, and tests of plans use it.
    """
    search = copy_of_the_installation(folder, with_code=False) / "slipstream" / "planner" / "search"
    for entry in compiled.ENTRIES:
        module, _, name = entry.rpartition(".")
        (folder / f"{module.replace('.', '/')}.py").write_text(ENTRY.format(name=name))
    compiles, rest = (search / "compiled.py").read_text().split("def _use_once() -> None:\n")
    (search / "compiled.py").write_text(compiles + USE_ONCE)
    assert "\n    AnnealingChain(" in rest and "\ndef " not in rest
    return folder


def run(folder: Path, **environment: str) -> list[str]:
    """What a process that uses this installation's machine code prints."""
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    done = subprocess.run([sys.executable, "-c", USE], cwd=folder, env=env, capture_output=True, text=True,
                          timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def answer(lines: list[str]) -> list[str]:
    return [line for line in lines if not line.startswith("#")]


def said(lines: list[str]) -> list[str]:
    return [line for line in lines if LINE in line]


def test_a_copy_of_an_installation_uses_the_machine_code_that_came_with_it(tmp_path):
    compiled.ready()
    copy_of_the_installation(tmp_path, with_code=True)
    kernel = tmp_path / "slipstream" / "planner" / "search" / "kernel"
    os.utime(kernel / "annealing" / "loop.py")  # newer than its machine code
    ask = "from slipstream.planner.search.compiled import is_compiled; print(is_compiled())"
    done = subprocess.run([sys.executable, "-c", ask], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
                          capture_output=True, text=True, timeout=SECONDS, check=True)
    assert done.stdout.split() == ["True"]


def test_compiled_before_it_is_used_and_again_when_a_source_differs(tmp_path):
    small_installation(tmp_path)
    first, second = run(tmp_path), run(tmp_path)
    assert len(said(first)) == 1 and said(second) == []
    assert answer(first) == answer(second) and OTHER not in first
    assert "children []" in first
    # Both entries are in other files: numba would take what it has kept of those.
    source = tmp_path / "slipstream" / "planner" / "search" / "kernel" / "annealing" / "random.py"
    code = source.read_text()
    source.write_text(code.replace("return np.int64(_bits(random) % np.uint64(bound))", "return bound - 1"))
    changed = run(tmp_path)
    assert len(said(changed)) == 1 and changed.count(OTHER) == 2
    assert len(list((tmp_path / "slipstream" / "planner").rglob("compiled-*"))) == 1


def test_where_nothing_can_be_written_every_process_compiles_for_itself(tmp_path):
    folder = small_installation(tmp_path / "installation")
    for kernel in ("kernel", "kernel/annealing"):
        code = folder / "slipstream" / "planner" / "search" / kernel / "__pycache__"
        code.write_text("a file where numba wants a folder")
    nowhere = str(tmp_path / "nowhere")
    Path(nowhere).write_text("neither is the user's folder one")
    lines = run(folder, HOME=nowhere, XDG_CACHE_HOME=nowhere)
    assert len(said(lines)) == 1 and "no folder can be written" in said(lines)[0]
    assert "children []" in lines


def test_no_plan_waits_for_the_compiler_within_its_time_limit():
    """Arrays of other types, or with gaps, would have the kernel compiled once more: five seconds."""
    from slipstream.planner.search.kernel import list_scheduler, start_times
    from slipstream.planner.search.kernel.annealing import loop

    compiled.ready()
    job = uniform_job(2, 4, 4, capacity=8)
    for layers in ("fixed", "move"):
        plan_only(PlanOptions(layers=layers, time_limit=0.5), job, [Worker(1, 2)])
    for entry in (list_scheduler.list_order, start_times.earliest, start_times.latest, loop.anneal):
        assert len(entry.signatures) == 1, entry.signatures
