"""Compile layers by torch.compile, with the backward in two: `[training] compile`.

torch.compile makes one graph of a layer's backward, whose results all appear at the same time. So
products with parameters are replaced by our own ops in the graph that torch compiles. The backward
of these ops computes the gradient of the input, and leaves the gradient of the weight to W
(`runtime.models.split_backward`). The rest of the layer is compiled as usual.
"""

import importlib.util
import operator
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from slipstream.runtime.config import ConfigError, RunConfig, may_have_extra_tensors
from slipstream.runtime.models.hugging_face.configuration import read_config
from slipstream.runtime.models.split_backward import (
    PRODUCTS,
    ProductWork,
    multiply,
    register_deferred_op,
)
from slipstream.runtime.torch_private import compile_with_inductor

_OPTIONS: Mapping[str, Any] = {
    "fallback_random": True,  # dropout is the same as in uncompiled layers
    # Tensors left to W are stored outside the compiler's view, so it must not write to them.
    "allow_buffer_reuse": False,
    "inplace_buffers": False,
}


COMPILABLE_MODELS = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
"""Kinds of transformers models that were tested to give the same numbers when compiled."""


def require_compilable(config: RunConfig, device: torch.device) -> None:
    """Raise ConfigError if torch.compile does not support layers, data or this machine."""
    named, model = "training.compile is true, and", config.model
    # Only tested models, and layers that do the same each time, are compiled.
    if model.torchtitan is not None:
        _require_torchtitan(config, named)
    elif model.hugging_face is None and model.name != "gpt":
        raise ConfigError(
            f"{named} model.name is {model.name!r}; expected a model that comes with the package, "
            "as torch.compile may not support what other layers do"
        )
    elif may_have_extra_tensors(config.training):
        raise ConfigError(
            f"{named} document_end or user-defined data may divide attention differently each time "
            "(by documents); expected false, or neither of them"
        )
    kind = None if model.hugging_face is None else read_config(model)["model_type"]
    if kind is not None and kind not in COMPILABLE_MODELS:
        raise ConfigError(
            f"{named} model.hugging_face names a {kind}, whose experts take other tokens each "
            f"time; expected false, or one of {', '.join(map(repr, COMPILABLE_MODELS))}"
        )
    # torch generates C++ for CPUs, and triton's language for GPUs.
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            f"{named} there is no C++ compiler {compiler!r}; expected one in PATH, "
            "or in the variable CXX"
        )
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError(f"{named} triton is not installed; install it: pip install triton")


def _require_torchtitan(config: RunConfig, named: str) -> None:
    # Imported here, as torchtitan may not be installed.
    from slipstream.runtime.models.torchtitan.specification import (
        needs_masks,
        require_no_experts,
        trainer_config,
    )

    trainer = trainer_config(config.model)
    require_no_experts(trainer, "compile, and experts take other tokens each time", "false")
    if needs_masks(trainer):
        raise ConfigError(
            f"{named} attention of model.torchtitan is given masks of documents, which is "
            "untested; expected false, or model.options.attention = 'sdpa'"
        )


def compile_layer(layer: nn.Module) -> None:
    """Compile a layer, or its `compiled_part`, at its next call, once for its kind.

    A layer whose `compiled_part` is None stays as it is.
    """
    module: Any = getattr(layer, "compiled_part", layer)
    if module is not None and not getattr(module, "is_compiled_here", False):
        module.is_compiled_here = True
        module.compile(backend=_compile_graph, fullgraph=True, dynamic=False)


def _compile_graph(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return a compiled function that runs a layer's graph on inputs like `inputs`."""
    # torch.compile calls this function as its backend.
    # Only products with trained parameters have a weight gradient to leave to W.
    places = [node for node in graph.graph.nodes if node.op == "placeholder"]
    parameters = {
        node
        for node, tensor in zip(places, inputs, strict=True)
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad
    }
    for node in list(graph.graph.nodes):
        _replace_product(graph, node, parameters)
    graph.recompile()
    compiled: Callable[..., Any] = compile_with_inductor(graph, inputs, _OPTIONS)
    return compiled


def _replace_product(graph: fx.GraphModule, node: fx.Node, parameters: set[fx.Node]) -> None:
    """Replace `node` of a graph by the op `product` if it multiplies by a parameter."""
    if node.op not in ("call_function", "call_method"):
        return
    # The same product may be written as a function, a method or `@`.
    target: Any = node.target
    if node.op == "call_method" and isinstance(target, str):
        target = getattr(Tensor, target)
    elif target is operator.matmul:
        target = torch.matmul
    if target not in PRODUCTS:
        return
    # The arguments are parsed as for layers that are not compiled.
    try:
        value, weight, bias, transposed = PRODUCTS[target](*node.args, **node.kwargs)
    except TypeError:  # a less usual argument (out, alpha, ...)
        return
    factor: Any = value
    if (
        weight not in parameters
        or (bias is not None and bias not in parameters)
        or not isinstance(factor, fx.Node)
    ):
        return
    # As in an uncompiled backward, only products of a matrix whose value has a gradient count.
    example_value: Tensor = factor.meta["example_value"]
    example_weight: Tensor = weight.meta["example_value"]  # type: ignore[attr-defined]
    if example_weight.dim() != 2 or not example_value.requires_grad:
        return
    kind = example_value.device.type
    with graph.graph.inserting_before(node):
        # Autocast would not change the operands of our own op.
        if torch.is_autocast_enabled(kind) and example_value.dtype != torch.float64:
            factor = graph.graph.call_method("to", (factor, torch.get_autocast_dtype(kind)))
        # Each product has a number of its own, so that two equal ones are not merged into one.
        site = sum(
            other.target is torch.ops.slipstream.product.default for other in graph.graph.nodes
        )
        ours = graph.graph.call_function(
            torch.ops.slipstream.product.default, (factor, weight, bias, transposed, site)
        )
        ours.meta = dict(node.meta)
    node.replace_all_uses_with(ours)
    graph.graph.erase_node(node)


@torch.library.custom_op("slipstream::product", mutates_args=())
def product(
    value: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transposed: bool,
    site: int,  # noqa: ARG001
) -> Tensor:
    """Return value @ weight^T, or value @ weight if `transposed`, plus the bias.

    The result has the value's dtype. Calls in one graph have different numbers `site`, so that the
    compiler does not merge equal ones.
    """
    return multiply(
        value, weight.to(value.dtype), None if bias is None else bias.to(value.dtype), transposed
    )


@product.register_fake
def _(
    value: Tensor,
    weight: Tensor,
    bias: Tensor | None,  # noqa: ARG001
    transposed: bool,
    site: int,  # noqa: ARG001
) -> Tensor:
    return value.new_empty(*value.shape[:-1], weight.shape[1 if transposed else 0])


@torch.library.custom_op("slipstream::product_input", mutates_args=())
def product_input(
    gradient: Tensor,
    value: Tensor,
    weight: Tensor,
    bias: Tensor | None,  # noqa: ARG001
    transposed: bool,
    site: int,  # noqa: ARG001
) -> Tensor:
    """Return the gradient for `value` alone, from that of `product`, with the same arguments."""
    used = weight.to(value.dtype)
    return gradient @ (used.t() if transposed else used)


@product_input.register_fake
def _(gradient: Tensor, value: Tensor, *_: Any) -> Tensor:  # noqa: ARG001
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def _save_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    value, weight, bias, ctx.transposed, ctx.site = inputs
    ctx.save_for_backward(value, weight, bias)


def _product_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return (
        torch.ops.slipstream.product_input(gradient, *ctx.saved_tensors, ctx.transposed, ctx.site),
        None,
        None,
        None,
        None,
    )


product.register_autograd(_product_backward, setup_context=_save_context)


def _product_work(
    gradient: Tensor,
    value: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transposed: bool,
    site: int,  # noqa: ARG001
) -> Callable[[], None]:
    # The compiler must pass the parameter itself on, not a copy.
    assert isinstance(weight, nn.Parameter), "the gradient would be lost"
    return ProductWork(value, gradient, weight, bias, transposed).add_gradients


register_deferred_op(torch.ops.slipstream.product_input.default, _product_work)
