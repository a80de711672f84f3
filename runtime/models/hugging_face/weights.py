"""Read pretrained safetensors, only the tensors of one layer at a time."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.runtime.config import ConfigError
from slipstream.runtime.models.hugging_face.configuration import MODEL_KEY, Family

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class PretrainedWeights:
    """Tensors in a folder of safetensors files, by their names. Raises ConfigError if there are
    none."""

    def __init__(self, folder: Path, family: Family) -> None:
        self._folder = folder
        self._wrong = f"{MODEL_KEY} is {str(folder)!r}"
        self._decoder = re.compile(rf"(?:^|\.){family.decoders}\.(\d+)\.(.+)$")
        self._files = self._read_index()

    def read_decoder(self, index: int) -> dict[str, Tensor]:
        """Return the tensors of decoder layer `index`, by their names within the layer."""
        names = {name: match[2] for name in self._files
                 if (match := self._decoder.search(name)) and int(match[1]) == index}
        return {names[name]: tensor for name, tensor in self._read_tensors(names).items()}

    def read_others(self, wanted: Mapping[str, tuple[str, ...]]) -> dict[str, Tensor]:
        """Return tensors outside of the decoder layers.

        For each name, `wanted` has the possible endings of the name in the files; the first that
        exists is read. Raises ConfigError if none exists.
        """
        outside = [name for name in self._files if not self._decoder.search(name)]
        tensors = {}
        for name, endings in wanted.items():
            source = next((full for ending in endings for full in outside if f".{full}".endswith(f".{ending}")), None)
            if source is None:
                raise ConfigError(f"{self._wrong}: its files have no tensor {endings[0]!r}")
            tensors[name] = self._read_tensors([source])[source]
        return tensors

    def _read_index(self) -> dict[str, str]:
        """Return the name of the file that has each tensor, by the tensor's name."""
        try:
            if (self._folder / INDEX_FILE).exists():
                files = json.loads((self._folder / INDEX_FILE).read_bytes())["weight_map"]
                return {str(name): str(file) for name, file in files.items()}
            with safe_open(self._folder / SINGLE_FILE, "pt") as file:
                return dict.fromkeys(file.keys(), SINGLE_FILE)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{self._wrong}: its weights cannot be read ({' '.join(str(error).split())}); expected "
                              f"{SINGLE_FILE} or {INDEX_FILE}; for random weights, name the config.json itself"
                               ) from None

    def _read_tensors(self, names: Mapping[str, str] | list[str]) -> dict[str, Tensor]:
        """Return the tensors of these names. Raises ConfigError if they cannot be read."""
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self._files[name], []).append(name)
        tensors = {}
        try:
            for path, here in by_file.items():
                with safe_open(self._folder / Path(path).name, "pt") as file:
                    tensors.update({name: file.get_tensor(name) for name in here})
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{self._wrong}: {' '.join(str(error).split())}") from None
        return tensors
