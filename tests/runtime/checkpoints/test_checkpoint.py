"""Checkpoints are whole or not at all, on any grid.

Nothing foreign or damaged is taken for one.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.runtime.checkpoints import checkpoint
from slipstream.runtime.checkpoints.checkpoint import (
    KEPT_CHECKPOINTS,
    CheckpointError,
    PendingSave,
    find_complete,
    find_newest_undamaged,
    identity_of,
    load_layers,
    open_checkpoint,
    open_latest,
    reopen_or_latest,
    start_saving,
)
from slipstream.runtime.checkpoints.parameters import (
    draft_layer,
    draft_layer_with_retry,
    layer_path,
    load_layer,
    load_parameters,
    publish_layer,
)
from slipstream.runtime.computing.slices import SliceRunner
from slipstream.runtime.config import RunConfig
from slipstream.runtime.data.data import Microbatch, load_data
from slipstream.runtime.models.layered_model import build_model
from slipstream.runtime.state.held_layers import HeldLayers, build_holding
from slipstream.runtime.state.part_state import as_whole_part
from slipstream.runtime.state.part_state import assemble_state as whole_state
from slipstream.runtime.tensor_codec import (
    TensorError,
    decode_tensors,
    encode_tensors,
    read_tensors,
    write_tensors,
)
from slipstream.runtime.tools.reference import reference_run
from tests.patience import SECONDS
from tests.runtime.running import tiny

IDENTITY = identity_of(tiny(), 4)
State = dict[int, dict[str, Tensor]]


def states(seed: int = 0, size: int = 50) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        layer: {
            "model.weight": torch.randn(size, generator=generator),
            "optimizer.step.weight": torch.tensor(float(layer)),
        }
        for layer in range(4)
    }


def share(state: State, *layers: int) -> State:
    return {layer: state[layer] for layer in layers}


def assert_same(left: State, right: State) -> None:
    assert left.keys() == right.keys()
    for layer, state in left.items():
        assert state.keys() == right[layer].keys()
        assert all(
            torch.equal(tensor, right[layer][name]) and tensor.dtype == right[layer][name].dtype
            for name, tensor in state.items()
        )


def write(folder: Path, iteration: int, state: State) -> None:
    """By two workers."""
    for layers in ((0, 2), (1, 3)):
        start_saving(folder, iteration, share(state, *layers), IDENTITY).wait()


def test_there_and_back(tmp_path) -> None:
    assert open_latest(tmp_path) is None and open_latest(tmp_path / "none") is None
    state = states()
    first = start_saving(tmp_path, 10, share(state, 0, 2), IDENTITY)
    first.wait()
    assert first.is_done() and open_latest(tmp_path) is None, "half of one is none"
    start_saving(tmp_path, 10, share(state, 1, 3), IDENTITY).wait()
    found = open_latest(tmp_path, IDENTITY)
    assert found is not None and found.iteration == 10
    assert_same(load_layers(found, range(4)), state)
    assert_same(load_layers(found, [2]), share(state, 2))
    assert {path.name for path in tmp_path.iterdir()} == {"iteration-10"}
    # Again, by a worker that came late.
    start_saving(tmp_path, 10, share(state, 1), IDENTITY).wait()


def test_what_is_saved_does_not_see_later_steps() -> None:
    """Parameters, what the optimizer remembers of them, and buffers."""
    layer = torch.nn.BatchNorm1d(3)
    optimizer = HeldLayers({0: layer}, tiny().training).optimizer
    optimizer.step(0)
    saved = whole_state(layer, optimizer.own_states(0))
    expected = {name: tensor.clone() for name, tensor in saved.items()}
    for tensor in (*layer.state_dict().values(), *optimizer.own_states(0)[0].tensors.values()):
        tensor.add_(1)
    assert_same({0: saved}, {0: expected})
    assert len(saved) == 5 + 2 * 3  # AdamW's state


def test_many_workers_at_once(tmp_path) -> None:
    for iteration in range(8):
        for saving in [
            start_saving(tmp_path, iteration, share(states(iteration), layer), IDENTITY)
            for layer in range(4)
        ]:
            saving.wait()
        found = open_latest(tmp_path)
        assert found is not None and found.iteration == iteration
        assert_same(load_layers(found, range(4)), states(iteration))
    assert len(list(tmp_path.iterdir())) == KEPT_CHECKPOINTS


def test_the_state_of_the_data_is_written_once_by_each_worker(tmp_path) -> None:
    # It may be long; any worker that knows it can complete the checkpoint, and so can one that does
    # not.
    layers, state = (
        {layer: {"model.weight": torch.ones(2)} for layer in range(4)},
        {"buffer": [1, 2, 3]},
    )
    start_saving(
        tmp_path, 5, {layer: layers[layer] for layer in (0, 1, 3)}, IDENTITY, data=state
    ).wait()
    notes = [
        json.loads(note.read_text()) for note in sorted(tmp_path.glob(".saving-5-0/layer-*.json"))
    ]
    assert [note.get("data") for note in notes] == [state, None, None]
    start_saving(tmp_path, 5, {2: layers[2]}, IDENTITY).wait()
    assert open_latest(tmp_path).manifest.data == state


def test_a_layer_saved_anew_replaces_the_first(tmp_path) -> None:
    # The first try ended with a failure; the iteration ran again and gave numbers that differ in
    # the last bits.
    start_saving(tmp_path, 10, share(states(1), 0, 1, 2), IDENTITY).wait()
    write(tmp_path, 10, states(2))
    found = open_latest(tmp_path)
    assert found is not None
    assert_same(load_layers(found, range(4)), states(2))


def test_killed_in_the_middle_of_a_save(tmp_path) -> None:
    write(tmp_path, 10, states())
    script = (
        "import sys; from pathlib import Path; from tests.runtime.checkpoints.test_checkpoint "
        "import *\n"
        f"big = states(size=4_000_000)\nwhile True: start_saving(Path({str(tmp_path)!r}), 20, "
        "share(big, 0, 1, 2), IDENTITY).wait()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    deadline = time.monotonic() + SECONDS
    while not list(tmp_path.glob(".saving-20-0/.layer-*")) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait(SECONDS)
    assert list(tmp_path.glob(".saving-20-0/*"))
    found = open_latest(tmp_path, IDENTITY)
    assert found is not None and found.iteration == 10
    assert_same(load_layers(found, range(4)), states())
    write(tmp_path, 30, states(3))
    assert {path.name for path in tmp_path.iterdir()} == {"iteration-10", "iteration-30"}


@pytest.mark.parametrize(
    ("find", "reads"),
    [
        (open_latest, "open_checkpoint"),
        (find_newest_undamaged, "open_checkpoint"),
        (find_newest_undamaged, "verify_checkpoint"),
    ],
)
def test_of_checkpoints_that_newer_ones_replace_while_they_are_read_the_newest_is_taken(
    find, reads, monkeypatch, tmp_path
) -> None:
    # Workers whose node 0 has died replace them, or a run that goes on in the folder.
    write(tmp_path, 10, states())
    [before], read = find_complete(tmp_path).values(), getattr(checkpoint, reads)
    found = open_checkpoint(before)

    def replaced(*arguments):
        monkeypatch.setattr(checkpoint, reads, read)
        for iteration in range(20, 20 + KEPT_CHECKPOINTS):
            write(tmp_path, iteration, states(iteration))
        return read(*arguments)

    monkeypatch.setattr(checkpoint, reads, replaced)
    newest, damaged = find(tmp_path) if find is find_newest_undamaged else (find(tmp_path), {})
    assert newest is not None and newest.iteration == 19 + KEPT_CHECKPOINTS and not damaged
    assert reopen_or_latest(found).iteration == 19 + KEPT_CHECKPOINTS


def test_a_checkpoint_that_is_written_again_while_it_is_read_is_not_damaged(
    monkeypatch, tmp_path
) -> None:
    # A run that is under way has gone back: it has removed the newest checkpoint, and reaches it
    # once more.
    write(tmp_path, 10, states())
    verify = checkpoint.verify_checkpoint

    def replaced(found):
        monkeypatch.setattr(checkpoint, "verify_checkpoint", verify)
        checkpoint.remove_newer(tmp_path, 0)
        write(tmp_path, 10, states(1))
        return verify(found)

    monkeypatch.setattr(checkpoint, "verify_checkpoint", replaced)
    newest, damaged = find_newest_undamaged(tmp_path)
    assert newest is not None and not damaged
    assert_same(load_layers(newest, range(4)), states(1))


def test_a_full_disk_loses_nothing(tmp_path) -> None:
    write(tmp_path, 10, states())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        saving = start_saving(tmp_path, 20, states(size=50_000), IDENTITY)
        with pytest.raises(
            CheckpointError, match=r"iteration 20 cannot be written: .*; earlier ones are untouched"
        ):
            saving.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.glob(".saving-20-0/*")), "it takes no room"
    found = open_latest(tmp_path)
    assert found is not None and found.iteration == 10
    write(tmp_path, 20, states(2))


def test_no_space_left_on_device(tmp_path, monkeypatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            start_saving(tmp_path, 1, states(), IDENTITY).wait()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"width": 32}}, "of another job: its model.width is 16, here it is 32"),
        ({"training": {"seed": 1}}, "its training.seed is 0, here it is 1"),
        ({"training": {"dtype": "float32"}}, "its parameters is 'float64', here it is 'float32'"),
    ],
)
def test_a_foreign_checkpoint_is_refused(change, message, tmp_path) -> None:
    write(tmp_path, 10, states())
    config = tiny()
    other = RunConfig(
        model=replace(config.model, **change.get("model", {})),
        training=replace(config.training, **change.get("training", {})),
    )
    with pytest.raises(CheckpointError, match=message):
        open_latest(tmp_path, identity_of(other, 4))
    start_saving(tmp_path, 20, share(states(), 0, 1), identity_of(other, 4)).wait()
    with pytest.raises(CheckpointError, match="of another job"):
        start_saving(tmp_path, 20, share(states(), 2, 3), IDENTITY).wait()


def test_what_may_change_between_runs() -> None:
    assert (
        identity_of(
            tiny(learning_rate=0.5, iterations=7, backend="gloo", text="x", clip_norm=1.0), 4
        )
        == IDENTITY
    )


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda path: flip(next(path.glob("layer-0002-*"))),
            "layer-0002.*its SHA-256 is not that of the bytes written",
        ),
        (
            lambda path: next(path.glob("layer-0001-*")).write_bytes(b"short"),
            "layer-0001.*5 bytes; expected",
        ),
        (
            lambda path: next(path.glob("layer-0000-*")).unlink(),
            "layer-0000.*cannot be read: No such file",
        ),
        (
            lambda path: (path / "manifest.json").write_text("{"),
            "manifest.json: no readable checkpoint",
        ),
        (
            lambda path: (path / "manifest.json").write_text('{"format": "other"}'),
            "not a Slipstream checkpoint",
        ),
        (
            lambda path: edit(path, lambda manifest: manifest["layers"].pop()),
            "does not name each layer",
        ),
        (
            lambda path: edit(
                path, lambda manifest: manifest["layers"][1].update(file="../../x.safetensors")
            ),
            "no readable",
        ),
        (
            lambda path: edit(path, lambda manifest: manifest.update(version=2)),
            "format version 2; this Slipstream reads 1",
        ),
    ],
)
def test_damage_is_named_in_one_line(damage, message, tmp_path) -> None:
    write(tmp_path, 10, states())
    damage(tmp_path / "iteration-10")
    with pytest.raises(CheckpointError, match=message) as caught:
        found = open_latest(tmp_path, IDENTITY)
        assert found is not None
        load_layers(found, range(4))
    assert "\n" not in str(caught.value)


def edit(path: Path, change) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_training_goes_on_from_it_on_another_grid(tmp_path) -> None:
    # Two stages train and save; one stage loads all layers and ends where an undisturbed run does.
    config = tiny()
    model = build_model(config.model, 0, torch.float64, torch.device("cpu"))
    identity = identity_of(config, model.layers)

    def stages(*ranges: tuple[int, int]) -> list[tuple[SliceRunner, HeldLayers]]:
        holdings = [build_holding(model, range(*layers), config.training) for layers in ranges]
        return [
            (SliceRunner(layers, holding.modules, model, loss_scale=1.0, config=config), holding)
            for layers, holding in zip(ranges, holdings, strict=True)
        ]

    before = stages((0, 2), (2, 4))
    for iteration in range(3):
        iterate(config, before, iteration)
    for _, holding in before:
        start_saving(
            tmp_path,
            3,
            {
                layer: whole_state(module, holding.optimizer.own_states(layer))
                for layer, module in holding.modules.items()
            },
            identity,
        ).wait()
    found = open_latest(tmp_path, identity)
    assert found is not None and found.iteration == 3
    [(_, whole)] = after = stages((0, 4))
    for layer, state in load_layers(found, range(4)).items():
        whole.optimizer.load_parts([as_whole_part(whole.modules[layer], layer, state)])
    whole.optimizer.set_version(2)
    for iteration in range(3, 6):
        iterate(config, after, iteration)
    for name, expected in reference_run(config, [1], 6).parameters.items():
        torch.testing.assert_close(
            whole.parameters_by_name()[name].detach(), expected, rtol=0, atol=1e-12
        )


def iterate(
    config: RunConfig, stages: list[tuple[SliceRunner, HeldLayers]], iteration: int
) -> None:
    microbatch = Microbatch(iteration, 0, 0)
    value, target = load_data(config).batch(microbatch, config.training.batch, config.model.context)
    for stage, _ in stages:
        value = stage.forward(microbatch, value, target if stage.last else None, split=True)
    gradient = None
    for stage, holding in reversed(stages):
        gradient = stage.backward(microbatch, gradient)
        holding.optimizer.step(iteration)
        holding.zero_gradients()


DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def unusual() -> dict[str, Tensor]:
    """Each dtype; shapes and layouts that are easily got wrong."""
    flat, table = torch.randn(6), torch.randn(4, 5)
    return {
        **{str(dtype): torch.ones(2, 3).to(dtype) for dtype in DTYPES},
        "scalar": torch.tensor(3.0),
        "bf16 scalar": torch.tensor(3.0, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "also empty": torch.empty(0),
        "transposed": torch.randn(3, 2).t(),
        "strided": table[:, 1:3],
        "expanded": torch.ones(1).expand(5),
        "first half": flat[:3],
        "second half": flat[3:],
        "all of it": flat,
        "tied": table,
        "tied too": table,
        "trained": torch.nn.Parameter(torch.ones(2)),
    }


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]) and tensor.dtype == right[name].dtype, name
        assert tensor.shape == right[name].shape and not tensor.requires_grad, name


def test_every_dtype_shape_and_layout(tmp_path) -> None:
    tensors = unusual()
    write_tensors(tmp_path / "file", tensors)
    assert_equal(read_tensors(tmp_path / "file"), tensors)
    assert_equal(decode_tensors(b"".join(encode_tensors(tensors))), tensors)
    assert decode_tensors(b"".join(encode_tensors({}))) == {}


def test_tensors_of_the_cpu_are_not_copied_to_be_sent() -> None:
    tensor = torch.zeros(4)
    _, piece = encode_tensors({"a": tensor})
    tensor += 1
    assert bytes(piece) == tensor.numpy().tobytes()


def test_dtypes_that_are_rare_are_sent_too() -> None:
    tensors = {"a": torch.tensor([1 + 2j, 3]), "b": torch.ones(3)}
    assert_equal(decode_tensors(b"".join(encode_tensors(tensors))), tensors)


def test_what_is_read_may_be_changed(tmp_path) -> None:
    write_tensors(tmp_path / "file", {"a": torch.ones(3)})
    for tensors in (
        read_tensors(tmp_path / "file"),
        decode_tensors(b"".join(encode_tensors({"a": torch.ones(3)}))),
    ):
        tensors["a"].zero_()
    assert read_tensors(tmp_path / "file")["a"].sum() == 3


def test_files_are_as_readable_as_any(tmp_path) -> None:
    (tmp_path / "plain").touch()
    write_tensors(tmp_path / "file", {"a": torch.ones(3)})
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "file"}


def test_files_of_earlier_versions_are_read(tmp_path) -> None:
    # Before the safetensors package wrote them, entries had any order, and spaces followed the
    # header.
    header = (
        b'{"model.b":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},'
        b'"a":{"dtype":"F32","shape":[],'
        b'"data_offsets":[4,8]},"none":{"dtype":"I64","shape":[0,3],"data_offsets":[8,8]}}'
    )
    header += b" " * (-len(header) % 8)
    data = b"\x80\x3f\x00\x40" + b"\0\0\x40\x40"
    (tmp_path / "file").write_bytes(len(header).to_bytes(8, "little") + header + data)
    assert_equal(
        read_tensors(tmp_path / "file"),
        {
            "model.b": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
            "a": torch.tensor(3.0),
            "none": torch.empty(0, 3, dtype=torch.int64),
        },
    )


def test_others_read_and_write_the_same_format(tmp_path) -> None:
    tensors = states()[1]
    write_tensors(tmp_path / "ours", tensors)
    assert_same({0: load_file(tmp_path / "ours")}, {0: tensors})
    save_file(tensors, tmp_path / "theirs", {"made": "elsewhere"})
    assert_same({0: read_tensors(tmp_path / "theirs")}, {0: tensors})


def test_final_parameters_wait_for_room_on_a_full_disk_and_say_so_once(tmp_path) -> None:
    said: list[str] = []
    state = states(size=50_000)[1]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    room = threading.Timer(0.5, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)))

    def say(line: str) -> None:
        said.append(line)
        room.start()

    try:
        draft_layer_with_retry(tmp_path, 1, 7, state, say, look_seconds=0.02)
        room.join()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not layer_path(tmp_path, 1).exists(), "only a draft"
    publish_layer(tmp_path, 1, 7)
    assert_equal(load_layer(tmp_path, 1), state)
    assert (
        len(said) == 1
        and "parameters cannot be written: File too large; the workers wait for free space"
        in said[0]
    )
    assert [path.name for path in (tmp_path / "parameters").iterdir()] == ["layer-0001.safetensors"]
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        draft_layer_with_retry(tmp_path / "file", 1, 7, state, said.append)


def test_final_parameters_are_one_safetensors_file_a_layer(tmp_path) -> None:
    layers = {
        layer: {"weight": torch.randn(2, 2, dtype=torch.bfloat16), "bias": torch.randn(2)}
        for layer in (0, 3, 10)
    }
    for layer, state in layers.items():
        draft_layer(tmp_path, layer, 1, state)
        publish_layer(tmp_path, layer, 1)
    assert {path.name for path in (tmp_path / "parameters").iterdir()} == {
        "layer-0000.safetensors",
        "layer-0003.safetensors",
        "layer-0010.safetensors",
    }
    assert_equal(load_layer(tmp_path, 3), layers[3])
    assert_equal(
        load_parameters(tmp_path),
        {
            f"{layer}.{name}": tensor
            for layer, state in layers.items()
            for name, tensor in state.items()
        },
    )
    layer_path(tmp_path, 3).write_bytes(b"nonsense")
    with pytest.raises(TensorError, match=r"layer-0003\.safetensors: not a safetensors file"):
        load_parameters(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        b"\x02\0\0\0\0\0\0\0{}x",
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x02\0\0\0\0\0\0\0{",
        *(
            len(header).to_bytes(8, "little") + header + b"12345678"
            for header in (
                b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
                b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
                b'{"a":{"dtype":"PY","shape":[8],"data_offsets":[0,8]}}',
                b'{"a":{"dtype":"U8","shape":[-8],"data_offsets":[0,8]}}',
                b'{"a":{"dtype":"U8","shape":[4611686018427387904,4],"data_offsets":[0,8]}}',
                b"[" * 10_000,
            )
        ),
    ],
)
def test_no_tensors(data, tmp_path) -> None:
    (tmp_path / "file").write_bytes(data)
    for read in (lambda: read_tensors(tmp_path / "file"), lambda: decode_tensors(data)):
        with pytest.raises(TensorError) as caught:
            read()
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_draft_becomes_a_checkpoint_only_when_it_is_allowed(tmp_path) -> None:
    state = states()
    saving = start_saving(tmp_path, 10, state, IDENTITY, order=3, allowed=False)
    saving.wait()
    assert open_latest(tmp_path) is None and list(tmp_path.glob(".saving-10-3/*"))
    saving.allow()
    saving.wait()
    assert open_latest(tmp_path).iteration == 10 and not list(tmp_path.glob(".saving*"))


def test_drafts_of_different_orders_do_not_mix_and_a_dropped_one_leaves_nothing(tmp_path) -> None:
    old, new = (
        start_saving(
            tmp_path, 10, share(states(order), *layers), IDENTITY, order=order, allowed=False
        )
        for order, layers in ((1, (0, 1)), (2, (2, 3)))
    )
    for saving in (old, new):
        saving.wait()
        saving.allow()
        saving.wait()
    assert open_latest(tmp_path) is None, "each has half of the layers"
    late = start_saving(tmp_path, 20, states(), IDENTITY, order=2, allowed=False)
    late.wait()
    late.drop()
    late.allow()
    late.wait()  # until it is removed
    assert open_latest(tmp_path) is None and not list(tmp_path.glob(".saving-20*"))


@pytest.mark.parametrize("settle", [PendingSave.allow, PendingSave.drop])
def test_a_save_can_be_waited_for_while_its_draft_is_being_allowed_or_dropped(
    settle, tmp_path, monkeypatch
) -> None:
    # The thread that trains waits for the last save when the main thread hears that its iteration
    # is committed.
    starting, may_start = threading.Event(), threading.Event()

    class Late(threading.Thread):
        def start(self) -> None:
            starting.set()
            assert may_start.wait(SECONDS)
            super().start()

    saving = start_saving(tmp_path, 10, states(), IDENTITY, allowed=False)
    saving.wait()
    settling = threading.Thread(target=settle, args=(saving,))
    monkeypatch.setattr(threading, "Thread", Late)
    settling.start()
    try:
        assert starting.wait(SECONDS)
        assert saving.is_done(), "it is written"
    finally:
        may_start.set()
        settling.join()
    saving.wait()
    assert (open_latest(tmp_path) is None) == (settle is PendingSave.drop) and not list(
        tmp_path.glob(".saving*")
    )


def test_a_folder_without_a_manifest_blocks_nothing(tmp_path) -> None:
    """As a process that was killed while it removed an old checkpoint leaves one."""
    (tmp_path / "iteration-10").mkdir()
    (tmp_path / "iteration-10" / "layer-0000-0123456789abcdef.safetensors").write_bytes(b"old")
    start_saving(tmp_path, 10, states(), IDENTITY).wait()
    found = open_latest(tmp_path)
    assert found.iteration == 10
    assert_equal(load_layers(found, [1])[1], states()[1])
