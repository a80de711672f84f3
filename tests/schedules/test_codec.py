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
from msgspec import UNSET
from msgspec.structs import replace

from slipstream.schedules.check import check
from slipstream.schedules.codec import (
    MAX_FILE_BYTES,
    ScheduleError,
    decode,
    encode,
    json_schema,
    read,
    write,
)
from slipstream.schedules.schedule import Worker
from slipstream.schedules.text_excerpt import render_excerpt
from tests.general import general_schedules, layers_moved
from tests.generate import BROKEN, by_hand, schedules
from tests.patience import SECONDS

GOOD = encode(by_hand(BROKEN))
GENERAL = encode(layers_moved())


def refused(data: bytes) -> str:
    with pytest.raises(ScheduleError) as caught:
        decode(data, "plan.json")
    message = str(caught.value)
    assert message.startswith("plan.json: ") and "\n" not in message and len(message) < 400
    return message


def changed(*path, value, of=GOOD) -> bytes:
    document = json.loads(of)
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


def test_what_a_file_of_version_2_holds():
    document = json.loads(GENERAL)
    assert document["slices"] == [[0, 3], [3, 4], [2, 3]]
    assert [seat[3] for seat in document["seats"]] == [None, None, [[0, 3]]]
    schedule = decode(GENERAL)
    assert schedule == layers_moved() and check(schedule) == []
    assert schedule.route_of(1, 0) == (2, 3) and schedule.route_of(0, 0) == (0, 1)
    assert (schedule.rerouted, schedule.shed) == (2, 1)
    assert schedule.held_layers(Worker(1, 0)) == ((0, 3),) and schedule.held_layers(
        Worker(0, 1)
    ) == ((2, 4),)


def version_1(data: bytes) -> bytes:
    """The file as version 1 wrote it."""
    document = json.loads(data) | {"version": 1}
    del document["slices"], document["times"]["optimizer_of_layer"]
    if document["memory"]:
        del document["memory"]["weights"]
    document.pop("bound_scope", None)
    document["seats"] = [seat[:3] for seat in document["seats"]]
    return json.dumps(document, separators=(",", ":")).encode()


@settings(max_examples=40)
@given(schedules())
def test_version_1_is_read_as_the_special_case(schedule):
    """The op arrays are the same."""
    old = version_1(encode(schedule))
    assert decode(old) == replace(schedule, bound_scope=UNSET)
    assert json.loads(old)["programs"] == json.loads(encode(schedule))["programs"]
    jsonschema.Draft202012Validator(json_schema()).validate(json.loads(old))


@pytest.mark.parametrize(
    ("path", "value", "names"),
    [
        (("slices",), [[0, 1]], "slices"),
        (("seats", 0), [[0, 0], [0, 0], 0, [[0, 1]]], "seats: layers held"),
        (("times", "optimizer_of_layer"), [1, 1], "times.optimizer_of_layer"),
    ],
)
def test_version_1_knows_no_layers(path, value, names):
    old = changed(*path, value=value, of=version_1(GOOD))
    assert f"{names}: not in version 1 of the format; expected version 2" in refused(old)


def test_schema_is_up_to_date():
    stored = (files("slipstream.schedules") / "schedule.schema.json").read_text()
    text = json.dumps(json_schema(), indent=1)
    assert json.loads(stored) == json.loads(text), (
        f"write this to schedules/schedule.schema.json:\n{text}"
    )


@settings(max_examples=20)
@given(st.one_of(schedules(max_pipelines=3, max_stages=2, max_microbatches=3), general_schedules()))
def test_schema_accepts_what_is_written(schedule):
    jsonschema.Draft202012Validator(json_schema()).validate(json.loads(encode(schedule)))


def test_schema_refuses_other_documents():
    validator = jsonschema.Draft202012Validator(json_schema())
    for document in ({}, json.loads(GOOD) | {"version": 3}, json.loads(GOOD) | {"surprise": 1}):
        assert not validator.is_valid(document)


@pytest.mark.parametrize("good", [GOOD, GENERAL])
def test_truncated_anywhere(good):
    for length in range(len(good) - 1):  # without only the newline at its end it is whole
        refused(good[:length])


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_random_bytes(data):
    refused(data)


@pytest.mark.parametrize("good", [GOOD, GENERAL])
def test_random_corruption(good):
    """A file with one byte changed is refused, or judged by the checker.

    It is a schedule of good form then.
    """
    rng = random.Random(1)
    for _ in range(2000):
        data = bytearray(good)
        data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            schedule = decode(bytes(data))
        except ScheduleError as error:
            assert "\n" not in str(error)
        else:
            assert all("\n" not in str(violation) for violation in check(schedule))


def any_value(depth=2):
    """Numbers where lists belong, lists too long, ranges the wrong way round, nulls, text."""
    plain = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 6),
        st.integers(),
        st.text(max_size=3),
        st.floats(allow_nan=False, allow_infinity=False),
    )
    return plain if not depth else st.one_of(plain, st.lists(any_value(depth - 1), max_size=6))


def places(value, path=()):
    yield path
    items = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        yield from places(inner, (*path, key))


@settings(max_examples=400)
@given(st.sampled_from(list(places(json.loads(GENERAL)))[1:]), any_value())
def test_any_value_anywhere(path, value):
    """A file with any value anywhere is refused in one line, or of good form.

    A schedule of good form is written, judged and shown without error.
    """
    try:
        schedule = decode(changed(*path, value=value, of=GENERAL), "plan.json")
    except ScheduleError as error:
        assert "\n" not in str(error) and len(str(error)) < 400
        return
    assert decode(encode(schedule)) == schedule
    for violation in check(schedule):
        render_excerpt(schedule, violation.op, violation.worker)
    assert schedule.rerouted >= 0 and schedule.shed >= 0


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no readable schedule"),
        (b"[]", "no readable schedule"),
        (b"{}", "key 'format' is None"),
        (
            changed("format", value="slipstream.trace"),
            "not a Slipstream schedule: key 'format' is 'slipstream.trace'",
        ),
        (changed("format", value="x" * 10**6), "no readable schedule"),
        (changed("version", value=3), "schedule format version 3; this Slipstream reads 1 and 2"),
        (changed("version", value=10**30), "no readable schedule"),
        (changed("job", value="\x1b[2J"), "printable"),
        (changed("job", value="x" * 10**6), "job is"),
        (changed("surprise", value=1), "unknown field `surprise`"),
        (changed("tick_seconds", value=float("nan")), "no readable schedule"),
        (changed("tick_seconds", value=float("inf")), "no readable schedule"),
        (changed("tick_seconds", value=0), "Expected `float` >= 1e-12 - at `$.tick_seconds`"),
        (GOOD.replace(b'"tick_seconds":0.5', b'"tick_seconds":1e999'), "out of range"),
        (GOOD.replace(b'"job":', b'"job":"first","job":'), "key 'job' is given twice"),
        (
            GOOD.replace(b'"transfer":', b'"transfer":5,"transfer":'),
            "key 'transfer' is given twice",
        ),
        (
            GOOD.replace(b'"programs":', b'"programs":[],"programs":'),
            "key 'programs' is given twice",
        ),
        (GOOD.replace(b'{"column":0', b'{"column":1,"column":0'), "key 'column' is given twice"),
        (GOOD + b"{}", "no readable schedule"),
        (
            changed("grid", "pipelines", value=10**9),
            "Expected `int` <= 131072 - at `$.grid.pipelines`",
        ),
        (changed("grid", "pipelines", value=131072), "grid.columns is 2; expected 1 to 1"),
        (changed("grid", "pipelines", value=0), "Expected `int` >= 1 - at `$.grid.pipelines`"),
        (
            changed("grid", "microbatches", value=[2]),
            "grid.microbatches has 1 values; expected 2, one per pipeline",
        ),
        (
            changed("grid", "microbatches", value=[2, 10**9]),
            "Expected `int` <= 65536 - at `$.grid.microbatches[1]`",
        ),
        (changed("grid", "stages", value=[{"column": 7}] * 2), "grid.stages column is 7"),
        (changed("grid", "chains", value=0), "Expected `int` >= 1 - at `$.grid.chains`"),
        (
            changed("grid", "chains", value=2),
            "grid.chains is 2; expected each chain to pass all 2 columns",
        ),
        (
            changed("times", "forward", value=[1]),
            "times.forward has 1 values; expected 2, one per stage",
        ),
        (changed("times", "transfer", value=-1), "Expected `int` >= 0 - at `$.times.transfer`"),
        (
            changed("times", "slow", value=[[[0, 0], 2000], [[0, 0], 3000]]),
            "times.slow: worker 0.0 after 0.0",
        ),
        (changed("failed", value=[[9, 9]]), "failed: worker 9.9 lies outside the grid"),
        (changed("seats", 0, value=[[0, 0], [0, 0], 99]), "worker 0.0 names program 99"),
        (
            changed("seats", 0, value=[[0, 0], [0, 0], -1]),
            "Expected `int` >= 0 - at `$.seats[0][2]`",
        ),
        (changed("seats", 0, value=[[0, 0, 0], [0, 0], 0]), "no readable schedule"),
        (changed("programs", 0, 0, value=["F", 10**9, 0, 0]), "programs[0][0] slice is 1000000000"),
        (
            changed("programs", 0, 0, value=["F", 0, 10**9, 0]),
            "Expected `int` <= 65535 - at `$.programs[0][0][2]`",
        ),
        (
            changed("programs", 0, 0, value=["F", 0, 0, -1]),
            "Expected `int` >= 0 - at `$.programs[0][0][3]`",
        ),
        (changed("programs", 0, 0, value=["F", 0, 0, 10**400]), "at `$.programs[0][0][3]`"),
        (changed("programs", 0, 0, value=["F", 0, 0, 0, 2]), "programs[0][0] pipeline is 2"),
        (changed("programs", 0, 0, value=["F", None, 0, 0]), "F needs a slice"),
        (changed("programs", 0, 0, value=["O", 0, None, 0]), "O takes no slice"),
        (changed("programs", 0, 0, value=["A", 0, 1, 0]), "A takes no micro-batch"),
        (changed("programs", 0, 0, value=["X", 0, 0, 0]), "no readable schedule"),
        (
            changed("slices", value=[[0, 5]], of=GENERAL),
            "slices: [0, 5] is not a range [first, end) of the 4 layers",
        ),
        (changed("slices", value=[[2, 2]], of=GENERAL), "slices: [2, 2] is not a range"),
        (changed("slices", value=[[-1, 2]], of=GENERAL), "slices: [-1, 2] is not a range"),
        (
            changed("slices", value=[[0, 10**12]], of=GENERAL),
            "slices: [0, 1000000000000] is not a range",
        ),
        (changed("slices", value=[[0, 3]] * 3, of=GENERAL), "slices: [0, 3] is given 3 times"),
        (
            changed("slices", value=[[0, 3]], of=GENERAL),
            "times.forward has 5 values; expected 3, one per slice",
        ),
        (changed("slices", value=[[0, 1, 2]] * 3, of=GENERAL), "no readable schedule"),
        (
            changed("slices", value=[[0, 2**62]], of=GOOD),
            "slices: [0, 4611686018427387904] is not a range",
        ),
        (
            changed("grid", "stages", 0, "layers", value=[1, 2], of=GENERAL),
            "grid.stages layers: with slices or layers",
        ),
        (
            changed("grid", "stages", 1, "layers", value=[2, 10**9], of=GENERAL),
            "[2, 1000000000] is not a range of layers",
        ),
        (
            changed("seats", 2, 3, value=[[0, 9]], of=GENERAL),
            "seats: layers held by worker 1.0: [0, 9] is not a range",
        ),
        (
            changed("seats", 2, 3, value=[[2, 3], [0, 1]], of=GENERAL),
            "[0, 1] after [2, 3]; expected ascending ranges",
        ),
        (
            changed("seats", 2, 3, value=[[0, 1], [1, 3]], of=GENERAL),
            "[1, 3] after [0, 1]; expected ascending ranges",
        ),
        (changed("seats", 2, 3, value=[0, 3], of=GENERAL), "no readable schedule"),
        (
            changed("seats", 2, value=[[1, 0], [1, 0], 2, [[0, 3]], 1], of=GENERAL),
            "no readable schedule",
        ),
        (
            changed("times", "optimizer_of_layer", value=[], of=GENERAL),
            "times.optimizer_of_layer has 0 values; expected 4",
        ),
        (
            changed("times", "optimizer_of_layer", value=[1] * 5, of=GENERAL),
            "times.optimizer_of_layer has 5 values",
        ),
        (
            changed("times", "optimizer_of_layer", 0, value=-1, of=GENERAL),
            ">= 0 - at `$.times.optimizer_of_layer[0]`",
        ),
        (
            changed("memory", "weights", value=[8] * 3, of=GENERAL),
            "memory.weights has 3 values; expected 4, one per layer",
        ),
        (changed("memory", "weights", value=[2**60] * 4, of=GENERAL), "- at `$.memory.weights[0]`"),
        (
            changed("memory", "activation", value=[1] * 2, of=GENERAL),
            "memory.activation has 2 values; expected 5",
        ),
        (
            changed("programs", 0, 0, 1, value=5, of=GENERAL),
            "programs[0][0] slice is 5; expected 0 to 4",
        ),
        (b"[" * 10**6, "no readable schedule"),
        (
            GOOD.replace(b'"job":"by hand"', b'"job":' + b"[" * 10**5 + b"]" * 10**5),
            "no readable schedule",
        ),
        (GOOD.replace(b'"job":"by hand"', b'"job":' + b'{"a":' * 10**5), "no readable schedule"),
        (
            GOOD.replace(b'"period_ticks":14', b'"period_ticks":' + b"9" * 10**5),
            "no readable schedule",
        ),
        (GOOD.replace(b'"job":"by hand"', b'"job":"\xff\xfe"'), "no readable schedule"),
    ],
)
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


def test_slices_and_holdings_without_bound(monkeypatch):
    # Few bytes may stand for many layers: all slices together, and all ranges held, are bounded.
    document = json.loads(GENERAL)
    layers = 2**17
    document["grid"]["stages"] = [
        {"column": 0, "layers": [0, 2]},
        {"column": 1, "layers": [2, layers]},
    ]
    document["slices"] = [[first, layers] for first in range(40)]
    assert "slices: more than 4194304 layers together" in refused(json.dumps(document).encode())
    monkeypatch.setattr("slipstream.schedules.codec.MAX_SLICE_LAYERS", 100)
    ranges = [[first, first + 1] for first in range(0, 210, 2)]
    document = json.loads(GENERAL) | {"seats": [[[0, 0], [0, 0], 0, ranges]]}
    assert "seats: more than 100 ranges of layers held" in refused(json.dumps(document).encode())


def test_files_that_are_none(tmp_path):
    for path in (tmp_path, tmp_path / "missing.json", tmp_path / ("x" * 300)):
        with pytest.raises(ScheduleError, match="cannot be read"):
            read(path)


def test_a_huge_file_in_bounded_memory(tmp_path):
    """8 GiB of nothing, and 1.5 GiB of address space to refuse it in."""
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(8 * 2**30)
    program = (
        "import resource, sys; from pathlib import Path; from slipstream.schedules.codec "
        "import read\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({3 * 2**29}, {3 * 2**29}))\n"
        "try: read(Path(sys.argv[1]))\n"
        "except ValueError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=SECONDS
    )
    assert (
        done.stdout == f"{path}: more than {MAX_FILE_BYTES} bytes, the limit for a schedule file\n"
    )
    assert done.stderr == ""
