"""Export a model to a folder that transformers loads: config.json, and one file a layer."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from slipstream.runtime.models.hugging_face.configuration import CONFIG_FILE, FAMILIES
from slipstream.runtime.models.hugging_face.model import (
    build_sample,
    router_of,
    small_layer_config,
    transformers_config,
)
from slipstream.runtime.models.hugging_face.weights import INDEX_FILE
from slipstream.runtime.tensor_codec import read_tensors, write_tensors
from slipstream.schedules.files import replace_folder

COPIED_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "vocab.json",
                "merges.txt", "chat_template.jinja", "generation_config.json")
"""Files that accompany the weights of a pretrained model and are copied unchanged."""
_REPLACED_KEYS = ("torch_dtype", "use_cache", "attn_implementation", "experts_implementation")
"""Keys of config.json that say how a model is run, or that the export sets."""
ReadLayer = Callable[[int], Mapping[str, Tensor]]
"""Function that returns a layer's own parameters and buffers by their names in it."""


def export_model(document: Mapping[str, Any], state: ReadLayer, folder: Path, source: Path | None = None) -> None:
    """Write a model as a folder that transformers can load, completely or not at all.

    It replaces what the folder holds. The parsed config.json of the model is `document`, and
    `state` maps a layer's number to its tensors. `source` is the folder of the pretrained model
    that training began with, whose tokenizer files are copied; None if there is none. Raises
    OSError if the folder cannot be written.
    """
    config = transformers_config(document, str(folder))
    with replace_folder(folder) as draft:
        files, bytes_, dtype = {}, 0, torch.float32
        layers = config.num_hidden_layers + 2
        for layer in range(layers):
            name = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
            tensors = dict(_with_file_names(config, layer, state(layer)))
            write_tensors(draft / name, tensors)
            files.update(dict.fromkeys(tensors, name))
            bytes_ += sum(tensor.nbytes for tensor in tensors.values())
            dtype = next((tensor.dtype for tensor in tensors.values()), dtype)
        index = {"metadata": {"total_size": bytes_}, "weight_map": dict(sorted(files.items()))}
        (draft / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        described = {**{key: value for key, value in document.items() if key not in _REPLACED_KEYS},
                     "architectures": [type(build_sample(config, 0)).__name__],
                     "dtype": str(dtype).removeprefix("torch.")}
        (draft / CONFIG_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        for name_of_copy in COPIED_FILES if source is not None else ():
            if source is not None and (source / name_of_copy).is_file():
                shutil.copyfile(source / name_of_copy, draft / name_of_copy)


def _with_file_names(config: PreTrainedConfig, layer: int, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield a layer's tensors with their names in transformers' files of the whole model."""
    family, model = FAMILIES[config.model_type], build_sample(config, 0)
    base = f"{model.base_model_prefix}."
    if layer in (0, config.num_hidden_layers + 1):
        for name, tensor in state.items():
            yield name if name.startswith("lm_head.") else base + name, tensor
        return
    own = {name.removeprefix("layer."): tensor for name, tensor in state.items()}
    first_decoder = f"{base}{family.decoders}.0."
    for name, tensor in _split_experts(config, layer - 1, own, first_decoder).items():
        yield f"{base}{family.decoders}.{layer - 1}.{name}", tensor


def _split_experts(config: PreTrainedConfig, index: int, state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Convert a decoder layer's tensors to files' form, in which experts are separate."""
    # The keys of `state` and of the result are names within the layer. `prefix`, such as
    # "model.layers.0.", is what transformers puts before these names in files of a model that has
    # no other decoder layer.
    model = build_sample(small_layer_config(config, index), 0)
    layer = getattr(model.base_model, FAMILIES[config.model_type].decoders)[0]
    if router_of(layer) is None:
        return state
    layer.load_state_dict(state, assign=True)
    with tempfile.TemporaryDirectory() as folder:
        others = {name: torch.zeros(tensor.shape) for name, tensor in model.state_dict().items()
                  if not name.startswith(prefix)}
        model.save_pretrained(folder, state_dict={
            **others, **{prefix + name: tensor for name, tensor in layer.state_dict().items()}})
        written = read_tensors(Path(folder) / "model.safetensors")
    return {name.removeprefix(prefix): tensor for name, tensor in written.items() if name.startswith(prefix)}
