"""Files come from anywhere: each is either read, or refused in one line."""

import json
import random
import subprocess
import sys
from importlib.resources import files

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.codec import MAX_FILE_BYTES, ScheduleError, decode, encode, json_schema, read, write
from tests.generate import BROKEN, by_hand, schedules

GOOD = encode(by_hand(BROKEN))


def refused(data: bytes) -> str:
    with pytest.raises(ScheduleError) as caught:
        decode(data, "plan.json")
    message = str(caught.value)
    assert message.startswith("plan.json: ") and "\n" not in message and len(message) < 400
    return message


def changed(*path, value) -> bytes:
    document = json.loads(GOOD)
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(document).encode()


def test_round_trip(tmp_path):
    write(by_hand(BROKEN), tmp_path / "plan.json")
    assert read(tmp_path / "plan.json") == by_hand(BROKEN)
    assert (tmp_path / "plan.json").read_bytes() == GOOD
    assert decode(json.dumps(json.loads(GOOD), indent=4).encode()) == by_hand(BROKEN)


def test_schema_is_up_to_date():
    stored = (files("schedules") / "schedule.schema.json").read_text()
    text = json.dumps(json_schema(), indent=1)
    assert json.loads(stored) == json.loads(text), f"write this to schedules/schedule.schema.json:\n{text}"


@settings(max_examples=20)
@given(schedules(max_pipelines=3, max_stages=2, max_microbatches=3))
def test_schema_accepts_what_is_written(schedule):
    jsonschema.Draft202012Validator(json_schema()).validate(json.loads(encode(schedule)))


def test_schema_refuses_other_documents():
    validator = jsonschema.Draft202012Validator(json_schema())
    for document in ({}, json.loads(GOOD) | {"version": 3}, json.loads(GOOD) | {"surprise": 1}):
        assert not validator.is_valid(document)


def test_truncated_anywhere():
    for length in range(len(GOOD) - 1):  # without only the newline at its end it is whole
        refused(GOOD[:length])


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_random_bytes(data):
    refused(data)


def test_random_corruption():
    """A file with one byte changed is refused, or is a schedule of good form; never anything else."""
    rng = random.Random(1)
    for _ in range(2000):
        data = bytearray(GOOD)
        data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            decode(bytes(data))
        except ScheduleError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(("data", "reason"), [
    (b"", "no readable schedule"),
    (b"[]", "no readable schedule"),
    (b"{}", "key 'format' is None"),
    (changed("format", value="slipstream.trace"), "no Slipstream schedule: key 'format' is 'slipstream.trace'"),
    (changed("format", value="x" * 10**6), "no readable schedule"),
    (changed("version", value=3), "schedule format version 3; this Slipstream reads 1 and 2"),
    (changed("version", value=10**30), "no readable schedule"),
    (changed("job", value="\x1b[2J"), "printable"),
    (changed("job", value="x" * 10**6), "job is"),
    (changed("surprise", value=1), "unknown field `surprise`"),
    (changed("tick_seconds", value=float("nan")), "no readable schedule"),
    (changed("tick_seconds", value=float("inf")), "no readable schedule"),
    (changed("tick_seconds", value=0), "tick_seconds is 0"),
    (GOOD.replace(b'"tick_seconds":0.5', b'"tick_seconds":1e999'), "out of range"),
    (GOOD.replace(b'"job":', b'"job":"first","job":'), "key 'job' is given twice"),
    (GOOD.replace(b'"transfer":', b'"transfer":5,"transfer":'), "key 'transfer' is given twice"),
    (GOOD.replace(b'"programs":', b'"programs":[],"programs":'), "key 'programs' is given twice"),
    (GOOD.replace(b'{"column":0', b'{"column":1,"column":0'), "key 'column' is given twice"),
    (GOOD + b"{}", "no readable schedule"),
    (changed("grid", "pipelines", value=10**9), "grid.pipelines is 1000000000; expected 1 to 131072"),
    (changed("grid", "pipelines", value=131072), "grid.columns is 2; expected 1 to 1"),
    (changed("grid", "pipelines", value=0), "grid.pipelines is 0"),
    (changed("grid", "microbatches", value=[2]), "grid.microbatches has 1 values; expected 2, one a pipeline"),
    (changed("grid", "microbatches", value=[2, 10**9]), "grid.microbatches is 1000000000"),
    (changed("grid", "stages", value=[{"column": 7}] * 2), "grid.stages column is 7"),
    (changed("grid", "chains", value=0), "grid.chains is 0"),
    (changed("grid", "chains", value=2), "grid.chains is 2; expected each chain to pass all 2 columns"),
    (changed("times", "forward", value=[1]), "times.forward has 1 values; expected 2, one a stage"),
    (changed("times", "transfer", value=-1), "times.transfer is -1"),
    (changed("times", "slow", value=[[[0, 0], 2000], [[0, 0], 3000]]), "times.slow: worker 0.0 after 0.0"),
    (changed("failed", value=[[9, 9]]), "failed: worker 9.9 lies outside the grid"),
    (changed("seats", 0, value=[[0, 0], [0, 0], 99]), "worker 0.0 names program 99"),
    (changed("seats", 0, value=[[0, 0], [0, 0], -1]), "worker 0.0 names program -1"),
    (changed("seats", 0, value=[[0, 0, 0], [0, 0], 0]), "no readable schedule"),
    (changed("programs", 0, 0, value=["F", 10**9, 0, 0]), "programs[0][0] slice is 1000000000"),
    (changed("programs", 0, 0, value=["F", 0, 10**9, 0]), "programs[0][0] micro-batch is 1000000000"),
    (changed("programs", 0, 0, value=["F", 0, 0, -1]), "programs[0][0] start is -1"),
    (changed("programs", 0, 0, value=["F", 0, 0, 10**400]), "start is 1000"),
    (changed("programs", 0, 0, value=["F", 0, 0, 0, 2]), "programs[0][0] pipeline is 2"),
    (changed("programs", 0, 0, value=["F", None, 0, 0]), "F needs a slice"),
    (changed("programs", 0, 0, value=["O", 0, None, 0]), "O takes no slice"),
    (changed("programs", 0, 0, value=["A", 0, 1, 0]), "A takes no micro-batch"),
    (changed("programs", 0, 0, value=["X", 0, 0, 0]), "no readable schedule"),
    (b"[" * 10**6, "no readable schedule"),
    (GOOD.replace(b'"job":"by hand"', b'"job":' + b"[" * 10**5 + b"]" * 10**5), "no readable schedule"),
    (GOOD.replace(b'"job":"by hand"', b'"job":' + b'{"a":' * 10**5), "no readable schedule"),
    (GOOD.replace(b'"period_ticks":14', b'"period_ticks":' + b"9" * 10**5), "no readable schedule"),
    (GOOD.replace(b'"job":"by hand"', b'"job":"\xff\xfe"'), "no readable schedule"),
])
def test_hostile(data, reason):
    assert reason in refused(data)


def test_one_program_for_too_many_workers():
    """A program is stored once: the ops of all workers together are what counts."""
    pipelines = 4000
    document = json.loads(GOOD)
    document["grid"] |= {"pipelines": pipelines, "microbatches": [2] * pipelines}
    document["programs"] = [document["programs"][0] * 400]
    document["seats"] = [[[pipeline, 0], [pipeline, 0], 0] for pipeline in range(pipelines)]
    assert "ops; expected at most" in refused(json.dumps(document).encode())


def test_files_that_are_none(tmp_path):
    for path in (tmp_path, tmp_path / "missing.json", tmp_path / ("x" * 300)):
        with pytest.raises(ScheduleError, match="cannot be read"):
            read(path)


def test_a_huge_file_in_bounded_memory(tmp_path):
    """8 GiB of nothing, and 1.5 GiB of address space to refuse it in."""
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(8 * 2**30)
    program = ("import resource, sys; from pathlib import Path; from schedules.codec import read\n"
               f"resource.setrlimit(resource.RLIMIT_AS, ({3 * 2**29}, {3 * 2**29}))\n"
               "try: read(Path(sys.argv[1]))\n"
               "except ValueError as error: print(error)\n")
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{path}: more than {MAX_FILE_BYTES} bytes, the most that a schedule file may have\n"
    assert done.stderr == ""
