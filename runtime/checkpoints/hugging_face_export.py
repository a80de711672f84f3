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

COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files that accompany the weights of a pretrained model and are copied unchanged."""
_REPLACED_KEYS = ("torch_dtype", "use_cache", "attn_implementation", "experts_implementation")
"""Keys of config.json that are not copied: the export sets them, or runs do."""
ReadLayer = Callable[[int], Mapping[str, Tensor]]
"""Function that returns a layer's parameters and buffers, by their names in the layer."""


def export_model(
    document: Mapping[str, Any], state: ReadLayer, folder: Path, source: Path | None = None
) -> None:
    """Write a model as a folder that transformers can load, completely or not at all.

    What the folder held is replaced. `document` is the parsed config.json of the model, and `state`
    returns a layer's tensors. `source` is the folder of the pretrained model, whose `COPIED_FILES`,
    as far as it has them, are copied; None: the model began with random parameters. Raises OSError
    if the folder cannot be written, and ConfigError if transformers refuses `document`.
    """
    config = transformers_config(document, str(folder))
    with replace_folder(folder) as draft:
        # The weights, one layer in memory at a time, and the index of their files.
        files, total_size, dtype = {}, 0, torch.float32
        layers = config.num_hidden_layers + 2
        for layer in range(layers):
            name = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
            tensors = dict(_with_file_names(config, layer, state(layer)))
            write_tensors(draft / name, tensors)
            files.update(dict.fromkeys(tensors, name))
            total_size += sum(tensor.nbytes for tensor in tensors.values())
            dtype = next((tensor.dtype for tensor in tensors.values()), dtype)
        index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(files.items()))}
        (draft / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        # config.json, without what says how the model was run here.
        described = {
            **{key: value for key, value in document.items() if key not in _REPLACED_KEYS},
            "architectures": [type(build_sample(config, 0)).__name__],
            "dtype": str(dtype).removeprefix("torch."),
        }
        (draft / CONFIG_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        if source is None:
            return
        for name in COPIED_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, draft / name)


def _with_file_names(
    config: PreTrainedConfig, layer: int, state: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a layer's tensors under the names that they have in transformers' files."""
    family, model = FAMILIES[config.model_type], build_sample(config, 0)
    base = f"{model.base_model_prefix}."
    # The first layer is the embedding, the last the norm and the head: they have no number.
    if layer in (0, config.num_hidden_layers + 1):
        for name, tensor in state.items():
            yield name if name.startswith("lm_head.") else base + name, tensor
        return
    decoder_state = {name.removeprefix("layer."): tensor for name, tensor in state.items()}
    first_decoder = f"{base}{family.decoders}.0."
    for name, tensor in _split_experts(config, layer - 1, decoder_state, first_decoder).items():
        yield f"{base}{family.decoders}.{layer - 1}.{name}", tensor


def _split_experts(
    config: PreTrainedConfig, index: int, state: dict[str, Tensor], prefix: str
) -> dict[str, Tensor]:
    """Return a decoder layer's tensors as in files, where experts are separate."""
    # `prefix`, such as "model.layers.0.", is before the names in files of a model with this one
    # decoder layer, as which transformers saves it.
    model = build_sample(small_layer_config(config, index), 0)
    layer = getattr(model.base_model, FAMILIES[config.model_type].decoders)[0]
    if router_of(layer) is None:
        return state
    layer.load_state_dict(state, assign=True)
    # The other tensors of this small model are only there so that transformers accepts it.
    whole = {
        name: torch.zeros(tensor.shape)
        for name, tensor in model.state_dict().items()
        if not name.startswith(prefix)
    }
    whole |= {prefix + name: tensor for name, tensor in layer.state_dict().items()}
    # transformers separates the experts when it saves, and has no function for that alone.
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, state_dict=whole)
        saved = read_tensors(Path(folder) / "model.safetensors")
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in saved.items()
        if name.startswith(prefix)
    }
