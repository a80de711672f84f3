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
    """Tensors in the safetensors files of a folder, by their names.

    Raises ConfigError if the folder has no such files.
    """

    def __init__(self, folder: Path, family: Family) -> None:
        self._folder = folder
        self._wrong = f"{MODEL_KEY} is {str(folder)!r}"
        self._decoder = re.compile(rf"(?:^|\.){family.decoders}\.(\d+)\.(.+)$")
        self._files = self._read_index()

    def read_decoder(self, index: int) -> dict[str, Tensor]:
        """Return the tensors of decoder layer `index`, by their names within the layer.

        The dict is empty if there is no such layer. Raises ConfigError if a file cannot be read.
        """
        names = {
            name: match[2]
            for name in self._files
            if (match := self._decoder.search(name)) and int(match[1]) == index
        }
        return {names[name]: tensor for name, tensor in self._read_tensors(names).items()}

    def read_others(self, wanted: Mapping[str, tuple[str, ...]]) -> dict[str, Tensor]:
        """Return tensors from outside of the decoder layers, by the names in `wanted`.

        For each name, `wanted` has the endings that it may have in the files; the first that is
        found counts. Raises ConfigError if none is found, or if a file cannot be read.
        """
        outside = [name for name in self._files if not self._decoder.search(name)]
        tensors = {}
        for name, endings in wanted.items():
            # Names in files may begin with the name of the whole model.
            sources = (
                full for ending in endings for full in outside if f".{full}".endswith(f".{ending}")
            )
            source = next(sources, None)
            if source is None:
                raise ConfigError(f"{self._wrong}: its files have no tensor {endings[0]!r}")
            tensors[name] = self._read_tensors([source])[source]
        return tensors

    def _read_index(self) -> dict[str, str]:
        try:
            # Large models have several files and an index; others a file that lists its tensors.
            if (self._folder / INDEX_FILE).exists():
                files = json.loads((self._folder / INDEX_FILE).read_bytes())["weight_map"]
                return {str(name): str(file) for name, file in files.items()}
            with safe_open(self._folder / SINGLE_FILE, "pt") as file:
                return dict.fromkeys(file.keys(), SINGLE_FILE)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{self._wrong}: its weights cannot be read ({' '.join(str(error).split())}); "
                f"expected {SINGLE_FILE} or {INDEX_FILE}; for random weights, name the config.json "
                "itself"
            ) from None

    def _read_tensors(self, names: Mapping[str, str] | list[str]) -> dict[str, Tensor]:
        # Each file is opened once.
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
