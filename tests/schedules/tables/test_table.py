"""Tables as files are looked up without a solver.

They are refused in one line when changed, cut or hostile.
"""

import gzip
import json
import shutil
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.planner.job.file import parse_job
from slipstream.planner.options import PlanOptions
from slipstream.planner.tables.build import EntryPlanner, all_tasks, basis_of
from slipstream.planner.tables.folder import TableFolder
from slipstream.schedules.check import check
from slipstream.schedules.codec import decode, encode
from slipstream.schedules.schedule import Worker
from slipstream.schedules.tables.file import (
    ENTRY_KIND,
    VERSION,
    Basis,
    TableError,
    decode_entry,
    encode_document,
    encode_entry,
    read_index,
    sha256_digest,
    with_digest,
)
from slipstream.schedules.tables.pattern import count_key, dead_column, roles_key, settled_key
from slipstream.schedules.tables.table import Table, library, library_names
from tests.general import general_schedules
from tests.patience import SECONDS

JOB = """
pipelines = 3
stages = 3
microbatches = [3, 2, 3]
[time]
forward = 2
backward_input = 2
backward_weight = 2
optimizer = 1
transfer = 1
slow = {"1.0" = 1.5}
"""
OPTIONS = PlanOptions(method="greedy", time_limit=0.5)
FAILURES = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A table with entries for counts and patterns of failures.

    It has one for each count and pattern of up to two failures, and for each count up to three,
    also with the slow worker among them.
    """
    path = tmp_path_factory.mktemp("table")
    job = parse_job(JOB)
    basis = basis_of(job, OPTIONS)
    table_folder = TableFolder(path, basis)
    table_folder.reopen()
    plan = EntryPlanner(job, OPTIONS, basis)
    healthy = [task for task in all_tasks(job, FAILURES, exact=False) if not task.failed]
    tasks = healthy + [task for task in all_tasks(job, 2, exact=True) if task.failed]
    for task in tasks:
        table_folder.add_part(plan(task))
    table_folder.publish(
        [task.key for task in tasks], JOB.encode(), max_failures=FAILURES, exact=False
    )
    return path


@pytest.fixture(scope="module")
def table(folder):
    return Table.load(folder)


WORKERS = [Worker(pipeline, column) for pipeline in range(3) for column in range(3)]


@settings(max_examples=150)
@given(failed=st.sets(st.sampled_from(WORKERS), max_size=FAILURES))
def test_looked_up_schedules_are_valid_and_of_the_entrys_period(table, failed):
    found = table.lookup(failed, roles_move=True)
    at_once = table.lookup(failed)
    assert at_once is None or (not at_once.layers_to_load and check(at_once.schedule) == [])
    if dead_column(failed, table.basis.grid) is not None:
        assert found is None
        return
    assert found is not None and check(found.schedule) == []
    entry = table.checked_schedule(found.key)
    assert (
        set(found.schedule.failed) == failed and found.schedule.period_ticks == entry.period_ticks
    )
    assert decode(encode(found.schedule)) == found.schedule
    assert {seat.worker for seat in found.moves} <= set(WORKERS) - failed
    assert found.layers_to_load <= len(found.moves)


def test_lookup_is_deterministic(folder, table):
    again = Table.load(folder)
    again.verify()
    failed = [Worker(2, 1), Worker(0, 1)]
    assert again.lookup(failed) == table.lookup(failed[::-1])


def test_unknown_workers_are_refused(table):
    with pytest.raises(
        ValueError, match=r"the job has no worker 3\.0; its grid is 3 pipelines x 3 stages"
    ):
        table.lookup([Worker(3, 0)])


def test_looking_up_needs_no_solver(folder):
    """The runtime may import this package alone."""
    code = (
        "import sys; from pathlib import Path; from slipstream.schedules.tables.table import "
        "Table; "
        f"from slipstream.schedules.schedule import Worker; "
        f"print(Table.load(Path({str(folder)!r})).lookup([Worker(0, 1)]).key); "
        "print([name for name in sys.modules"
        " if name.startswith(('ortools', 'torch', 'scipy', 'slipstream.planner'))])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
        env={"PYTHONPATH": ":".join(path or "." for path in sys.path)},
    )
    key, modules = result.stdout.split("\n")[:2]
    assert key.startswith(("pattern-", "count-")) and modules == "[]"


@settings(max_examples=60)
@given(
    st.lists(
        general_schedules().filter(
            lambda schedule: all(seat.worker == seat.role for seat in schedule.seats)
        ),
        min_size=1,
        max_size=3,
    )
)
def test_entries_with_slices_and_layers_held(schedules):
    """Each entry has its own slices, times and ticks.

    What it shares with the table is stored once.
    """
    numbers: dict[bytes, int] = {}
    for schedule in schedules:
        basis = Basis(
            job=schedule.job,
            tick_seconds=1.0,
            grid=schedule.grid,
            memory=None,
            backward=schedule.backward,
            times=schedule.times,
            optimizer=schedule.optimizer,
            method="m",
            time_limit=1.0,
            seed=0,
        )
        entry = encode_entry("count-1", schedule, basis, numbers)
        assert entry.tick_seconds(basis) == schedule.tick_seconds
        same = msgspec.json.decode(msgspec.json.encode(entry), type=type(entry))
        assert decode_entry(same, basis, list(numbers)) == schedule


def test_tables_of_version_1_are_read(folder, table, tmp_path):
    # A version 1 file has no key of version 2; its digest is that of its own text.
    copy = tmp_path / "table"
    shutil.copytree(folder, copy)
    index = json.loads((copy / "index.json").read_bytes()) | {"version": 1, "sha256": ""}
    del index["basis"]["times"]["optimizer_of_layer"]
    # Have times of their own.
    index["entries"] = [
        row
        for row in index["entries"]
        if "-with-" not in row["key"] and not row["key"].startswith(roles_key(""))
    ]
    for row in index["entries"]:
        path = copy / "entries" / f"{row['key']}.json"
        entry = json.loads(path.read_bytes()) | {"version": 1}
        del entry["holds"], entry["costs"]
        path.write_text(json.dumps(entry, separators=(",", ":")))
        row["sha256"] = sha256_digest(path.read_bytes())
    index["sha256"] = sha256_digest(json.dumps(index, separators=(",", ":")).encode())
    (copy / "index.json").write_text(json.dumps(index, separators=(",", ":")))
    old = Table.load(copy)
    schedules = [table.checked_schedule(row.key) for row in old.rows()]
    assert [old.checked_schedule(row.key) for row in old.rows()] == schedules


# --- Files that are not as they should be ---------------------------------------------------------


def broken(folder, tmp_path, name, change):
    copy = tmp_path / "table"
    shutil.copytree(folder, copy)
    path = copy / name
    path.write_bytes(change(path.read_bytes()))
    return copy


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("index.json", lambda data: data[:200], r"index\.json: no readable table"),
        ("index.json", lambda data: b"", r"index\.json: no readable table"),
        ("index.json", lambda data: b"[" * 10**5, r"index\.json: no readable table"),
        (
            "index.json",
            lambda data: data.replace(b'"version":2', b'"version":7', 1),
            r"table format version 7; this",
        ),
        (
            "index.json",
            lambda data: data.replace(b"slipstream.table", b"slipstream.chair"),
            r"not a Slipstream table",
        ),
        (
            "index.json",
            lambda data: data.replace(b'"failures":1', b'"failures":2', 1),
            r"index\.json: changed since",
        ),
        (
            "entries/count-1.json",
            lambda data: data.replace(b"1", b"2", 1),
            r"count-1\.json: not as the index describes",
        ),
        (
            "programs.json.gz",
            lambda data: data[:-9],
            r"programs\.json\.gz: not as the index describes",
        ),
    ],
)
def test_changed_files_are_refused_in_one_line(folder, tmp_path, name, change, says):
    with pytest.raises(TableError, match=says) as error:
        Table.load(broken(folder, tmp_path, name, change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["index.json", "programs.json.gz", "entries/count-1.json"])
def test_missing_files_are_named(folder, tmp_path, name):
    copy = broken(folder, tmp_path, name, bytes)
    (copy / name).unlink()
    with pytest.raises(TableError, match=f"{name}: cannot be read: No such file"):
        Table.load(copy)


def forged(folder, tmp_path, **changes):
    """A table by somebody who can compute digests: files replaced, the index made to fit."""
    copy = broken(folder, tmp_path, "index.json", bytes)
    index = read_index(copy)
    rows = {row.key: row for row in index.entries}
    for key, change in changes.items():
        if key == "programs":
            (copy / "programs.json.gz").write_bytes(change)
            index = msgspec.structs.replace(index, programs_sha256=sha256_digest(change))
        elif key == "basis":
            index = msgspec.structs.replace(
                index, basis=msgspec.structs.replace(index.basis, **change)
            )
        else:
            name = key.replace("_", "-")
            path = copy / "entries" / f"{name}.json"
            path.write_bytes(change(path.read_bytes()))
            rows[name] = msgspec.structs.replace(
                rows[name], sha256=sha256_digest(path.read_bytes())
            )
    index = with_digest(msgspec.structs.replace(index, entries=tuple(rows.values())))
    (copy / "index.json").write_bytes(encode_document(index))
    return copy


def changed(**fields):
    def change(data):
        return json.dumps(json.loads(data) | fields).encode()

    return change


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"count_1": changed(period_ticks=1, lower_bound_ticks=0)},
            "the schedule breaks a rule: period",
        ),
        ({"count_1": changed(seats=[[0]] * 8)}, "the schedule breaks a rule"),
        ({"count_1": changed(seats=[[10**6]] * 8)}, "entry count-1: not readable"),
        ({"count_1": changed(seats=[[-1]] * 8)}, "Expected `int` >= 0"),
        ({"count_1": changed(seats=[])}, "entry count-1: not readable"),
        ({"count_1": changed(holds=[[[0, 3]]])}, "entry count-1: not readable"),
        ({"count_1": changed(holds=[[[0, 10**9]]] * 8)}, r"\[0, 1000000000\] is not a range"),
        (
            {"count_1": changed(holds=[[[0, 3]]] * 8)},
            "times.optimizer_of_layer has 0 values; expected 3, one per layer",
        ),
        (
            {"count_1": changed(costs={"tick_seconds": 1.0, "slices": [[0, 1]] * 2})},
            "missing required field `times`",
        ),
        ({"count_1": changed(key="count-2")}, "count-1.json: holds entry 'count-2'"),
        ({"count_1": changed(failed=[[7, 7]])}, "count-1.json: holds entry 'count-1', not the one"),
        (
            {"count_1": lambda data: data.replace(b'"key"', b'"key":"count-1","key"', 1)},
            "'key' is given twice",
        ),
        (
            {
                "programs": gzip.compress(
                    b'{"format":"slipstream.programs","version":1,"programs":[[["F"]]]}'
                )
            },
            "not readable",
        ),
        ({"programs": b"no gzip"}, "programs.json.gz: not readable as gzip"),
        (
            {"programs": gzip.compress(b'{"format":"slipstream.programs","version":1}')},
            "programs.json.gz: no readable",
        ),
        (
            {"basis": {"tick_seconds": -1.0}},
            "index.json: .*Expected `float` >= 1e-12 - at `..basis.tick_seconds`",
        ),
    ],
)
def test_forged_tables_are_refused_in_one_line(folder, tmp_path, changes, says):
    with pytest.raises(TableError, match=says) as error:
        Table.load(forged(folder, tmp_path, **changes)).checked_schedule("count-1")
    assert "\n" not in str(error.value)


def test_a_bomb_is_not_unpacked(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.schedules.tables.file.MAX_PROGRAMS_BYTES", 10**5)
    with pytest.raises(TableError, match="unpacks to more than 100000 bytes"):
        Table.load(forged(folder, tmp_path, programs=gzip.compress(b" " * 10**7)))


def test_keys_cannot_leave_the_folder(folder, tmp_path):
    copy = broken(folder, tmp_path, "index.json", bytes)
    index = read_index(copy)
    rows = (msgspec.structs.replace(index.entries[0], key="../../count-0"), *index.entries[1:])
    (copy / "index.json").write_bytes(
        encode_document(with_digest(msgspec.structs.replace(index, entries=rows)))
    )
    with pytest.raises(TableError, match="is not the key of an entry"):
        Table.load(copy)


# --- The tables that come with Slipstream ---------------------------------------------------------


def test_an_entry_of_an_earlier_version_can_be_written_again(folder):
    """As where entries are added to its table."""
    entry = ENTRY_KIND.decode((folder / "entries" / "count-1.json").read_bytes(), "")
    older = msgspec.structs.replace(entry, bound_scope=msgspec.UNSET)
    assert ENTRY_KIND.decode(encode_document(older), "") == older


@pytest.mark.parametrize("name", library_names())
def test_library_tables_are_whole(name):
    path = library(name)
    assert path is not None and library("nonsense") is None
    table = Table.load(path)
    table.verify()
    assert parse_job(table.job_text().decode()).pipelines == table.basis.grid.pipelines
    assert [row.key for row in table.rows()][:3] == ["count-0", "count-1", "count-2"]
    found = table.lookup([Worker(1, 2), Worker(3, 2)], roles_move=True)
    assert found is not None and check(found.schedule) == []
    assert table.index.version == VERSION
    rows = {row.key: row for row in table.rows()}
    for failures in range(1, table.index.max_failures + 1):
        at_once, settled = rows[count_key(failures)], rows[settled_key(count_key(failures))]
        assert settled.period < at_once.period and settled.layers_moved > 0
        assert settled.bytes_moved > 0 and settled.seconds_to_move > 0
        assert f"{settled.throughput:.2%}" in (path / "index.md").read_text()
