"""The contract of own models and data.

What breaks it is one line: the layer, what it gave, what was expected.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from slipstream.runtime.computing.forms import find_forms
from slipstream.runtime.config import ConfigError, ModelConfig, RunConfig, parse_run_config
from slipstream.runtime.data.data import Microbatch, batch_form, load_data
from slipstream.runtime.models.compiling import require_compilable
from slipstream.runtime.models.layered_model import build_model
from slipstream.runtime.replay.layer_values import (
    TensorForm,
    TupleForm,
    form_of,
    gradient_form,
    pack_value,
    tensors_of,
    unpack_value,
)

CPU = torch.device("cpu")
HERE = "tests.runtime.computing.test_forms"


class Layer(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Any) -> Any:
        return self.call(x)


class Three:
    """A model of an embedding, one layer of a test's, and a sum."""

    def __init__(
        self,
        config: ModelConfig,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        middle: Callable[..., Any] = lambda x: x,
    ) -> None:
        self.layers, self.device, self.middle = 3, device, middle

    def build(self, layer: int) -> nn.Module:
        return [nn.Embedding(256, 4), Layer(self.middle), nn.Linear(4, 256)][layer]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


class NoDevice(Three):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        del self.device


class NoLayers(Three):
    layers = 0

    def __init__(self, *arguments: Any) -> None:
        self.device = CPU


def broken(*_: object) -> None:
    raise RuntimeError("first\nsecond")


def config(**training: object) -> RunConfig:
    return parse_run_config({"context": 8, "name": f"{HERE}:Three"}, {"batch": 2, **training})


def refusal(model: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        find_forms(model, config())
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"model.name is '{HERE}:Three': ")


@pytest.mark.parametrize(
    ("middle", "message"),
    [
        (
            lambda x: [x, x],
            "layer 1 (Layer) gives a list of (float32 [2, 8, 4], float32 [2, 8, 4]); expected "
            "a tensor, or "
            "a tuple of tensors",
        ),
        (
            lambda x: (x, 3),
            "layer 1 (Layer) gives a tuple of (float32 [2, 8, 4], int); expected a tensor, or "
            "a tuple of "
            "tensors",
        ),
        (
            lambda x: None,
            "layer 1 (Layer) gives NoneType; expected a tensor, or a tuple of tensors",
        ),
        (
            lambda x: x.argmax(-1),
            "layer 1 (Layer) gives int64 [2, 8]; expected a tensor of floating point, or a "
            "tuple with "
            "one",
        ),
        (
            lambda x: x[x > 0],
            "layer 1 (Layer) has shapes that depend on its data (aten.nonzero.default); "
            "expected shapes that are the same for all micro-batches",
        ),
        (
            lambda x: x @ torch.zeros(3, 3),
            "layer 1 (Layer) fails on float32 [2, 8, 4]: RuntimeError: ",
        ),
        (
            lambda x: (x, x),
            "layer 2 (Linear) fails on a tuple of (float32 [2, 8, 4], float32 [2, 8, 4]): "
            "TypeError: ",
        ),
    ],
)
def test_layers(middle, message) -> None:
    model = Three(ModelConfig(), 0, torch.float32, CPU, middle)
    assert refusal(model).startswith(message)


def test_losses_and_builds() -> None:
    model = Three(ModelConfig(), 0, torch.float32, CPU)
    model.loss = lambda output, target: output.mean(-1)  # type: ignore[method-assign]
    assert (
        refusal(model)
        == "loss gives float32 [2, 8]; expected a tensor of no dimensions, a micro-batch's mean"
    )
    model.loss = lambda output, target: output[target > 3].mean()  # type: ignore[method-assign]
    assert len(find_forms(model, config())) == 4
    model.build = lambda layer: broken()  # type: ignore[method-assign]
    assert refusal(model) == "layer 0 cannot be built: RuntimeError: first"
    with pytest.raises(
        ConfigError, match=r"^model\.torchtitan is 'llama3/8B': layer 0 cannot be built"
    ):
        find_forms(model, parse_run_config({"context": 8, "torchtitan": "llama3/8B"}, {"batch": 2}))
    model.build = lambda layer: 3  # type: ignore[method-assign]
    assert refusal(model) == "layer 0 is int; expected a torch.nn.Module"


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        (
            (("0.weight", "1.weight"),),
            "layers share 0.weight, 1.weight, but Layer has no attribute `weight`",
        ),
        (
            (("0.weight", "2.bias"),),
            "2.bias is float32 [256]; expected float32 [256, 4], as 0.weight, with "
            "which it is shared",
        ),
        (
            ("0.weight", "2.weight"),
            "the model's shared is ('0.weight', '2.weight'); expected groups of parameters of ",
        ),
        (
            (("0.weight", "7.weight"),),
            "the model's shared is (('0.weight', '7.weight'),); expected groups of ",
        ),
    ],
)
def test_what_layers_share(shared, message) -> None:
    model = Three(ModelConfig(), 0, torch.float32, CPU)
    model.shared = shared  # type: ignore[attr-defined]
    assert refusal(model).startswith(message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoDevice", "it has no device; expected the torch.device that it was given"),
        ("NoLayers", "its layers is 0; expected a number above 0"),
        ("broken", ", which fails: RuntimeError: first"),
    ],
)
def test_models(name, message) -> None:
    with pytest.raises(ConfigError) as caught:
        build_model(parse_run_config({"name": f"{HERE}:{name}"}, {}).model, 0, torch.float32, CPU)
    assert (
        str(caught.value).removeprefix(f"model.name is '{HERE}:{name}'").removeprefix(": ")
        == message
    )


class Numbers:
    """Data that tell what they were told."""

    digest: object = "numbers"

    def __init__(self, config: RunConfig) -> None:
        self.given = config.training.options["given"]

    def batch(self, microbatch: Microbatch, batch: int, context: int) -> Any:
        if not self.given:
            return [1, 2]
        return tuple(torch.zeros(batch, context) for _ in range(self.given))


class BytesDigest(Numbers):
    digest = b"numbers"


def test_data_are_told_options_and_must_give_tuples_of_tensors() -> None:
    def read(name: str, option: int) -> TupleForm:
        return batch_form(config(data=f"{HERE}:{name}", options={"given": option}))

    assert read("Numbers", 3).tensors == (TensorForm((2, 8), torch.float32),) * 3
    for option, kind in (1, "tuple of ['Tensor']"), (0, "list of ['int', 'int']"):
        with pytest.raises(ConfigError, match="its batch is a ") as caught:
            read("Numbers", option)
        assert f"its batch is a {kind}; expected a tuple of tensors: the input of layer 0" in str(
            caught.value
        )
    with pytest.raises(ConfigError, match=r"BytesDigest': its digest is a bytes; expected a str$"):
        read("BytesDigest", 2)
    with pytest.raises(ConfigError, match=r"Numbers', which fails: KeyError: 'given'$"):
        load_data(config(data=f"{HERE}:Numbers"))


class Named(NamedTuple):
    x: Tensor
    flags: Tensor
    y: Tensor


def test_a_tuple_travels_as_one_tensor() -> None:
    value = Named(
        torch.randn(3, 5, dtype=torch.float64),
        torch.tensor([True, False, True]),
        torch.randn(7).bfloat16(),
    )
    form = form_of(value)
    there = unpack_value(pack_value(value), form)
    assert form_of(there) == form and there.flags is there[1]  # type: ignore[union-attr]
    assert all(map(torch.equal, tensors_of(there), value))
    assert gradient_form(form) == TupleForm(
        (TensorForm((3, 5), torch.float64), TensorForm((7,), torch.bfloat16))
    )
    alone = (torch.randn(4),)
    assert pack_value(alone) is alone[0] and unpack_value(alone[0], form_of(alone)) == alone


def test_a_model_without_such_parts_cannot_compute_them_again() -> None:
    with pytest.raises(
        ConfigError, match=r"^training\.recompute names 'mlp', but no layer has that part "
    ):
        find_forms(Three(ModelConfig(), 0, torch.float32, CPU), config(recompute=[1, "mlp"]))


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (
            {"recompute": "mlp"},
            "training.compile is true, and recompute is given; expected one of them",
        ),
        (
            {"recompute": [1]},
            "training.compile is true, and recompute is given; expected one of them",
        ),
        (
            {"tensor_parallel": 2},
            "training.compile is true, and tensor_parallel 2; expected one of them",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused(training: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(compile=True, **training)


def test_layers_of_ones_own_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_run_config({"name": f"{HERE}:Three"}, {"compile": True})
    with pytest.raises(
        ConfigError,
        match=r"^training\.compile is true, and model\.name is .*; expected a model that",
    ):
        find_forms(build_model(config.model, 0, torch.float32, CPU), config)
    documents = parse_run_config(
        {}, {"compile": True, "data": "tests.runtime.uneven_data:documents"}
    )
    with pytest.raises(
        ConfigError,
        match=r"^training\.compile is true, and document_end or user-defined data may "
        "divide",
    ):
        require_compilable(documents, CPU)
    monkeypatch.setenv("CXX", "no-such-compiler")
    gpt = parse_run_config({}, {"compile": True})
    with pytest.raises(
        ConfigError, match=r"^training\.compile is true, and there is no C\+\+ compiler 'no-such-"
    ):
        find_forms(build_model(gpt.model, 0, torch.float32, CPU), gpt)
