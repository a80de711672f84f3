"""What tests of torchtitan train on, and with.

A folder has a tokenizer and a data set; its Trainer has a model.
"""

import json
import random
from pathlib import Path

WORDS = [
    "pipelines",
    "bubble",
    "stage",
    "worker",
    "of",
    "the",
    "is",
    "a",
    "gradient",
    "dies",
    "returns",
    "and",
]


def write_assets(folder: Path) -> Path:
    """A tokenizer of words, and a data set of documents of different lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ["<s>", "</s>", "<unk>", *WORDS]
    places = {name: place for place, name in enumerate(names)}
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "normalizer": None,
                "post_processor": None,
                "decoder": None,
                "pre_tokenizer": {"type": "Whitespace"},
                "added_tokens": [
                    {
                        "id": place,
                        "content": name,
                        "single_word": False,
                        "lstrip": False,
                        "rstrip": False,
                        "normalized": False,
                        "special": True,
                    }
                    for place, name in enumerate(names[:3])
                ],
                "model": {
                    "type": "WordLevel",
                    "vocab": places,
                    "unk_token": "<unk>",
                },
            }
        )
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    )
    data = folder / "data"
    data.mkdir(exist_ok=True)
    drawn = random.Random(0)
    lines = [" ".join(drawn.choices(WORDS, k=5 + 7 * place % 40)) for place in range(200)]
    (data / "data.json").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return folder
