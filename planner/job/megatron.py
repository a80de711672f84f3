"""Parse the split of a model into stages as Megatron-LM's `--pipeline-model-parallel-layout` writes it.

An example is `Et*3|(t*2|)*29,t|L`. E is the embedding, t a decoder layer, L the head with the loss; `|` ends a stage,
`x*3` repeats a letter three times, `(..)*3` repeats what is within, and commas mean nothing. Stages are assigned to
ranks round-robin. Sources: Megatron Core's user guide ("Custom Pipeline Model Parallel Layout",
docs.nvidia.com/megatron-core) and `megatron/core/transformer/pipeline_parallel_layer_layout.py`.
"""

import re

from slipstream.planner.job.toml import JobError, shorten_repr
from slipstream.schedules.schedule import MAX_WORKERS

_REPEATED_GROUP = re.compile(r"\(([^()]*)\)\*(\d{1,9})")
_REPEATED_LETTER = re.compile(r"([EtmL|])\*(\d{1,9})")


def layout_counts(key: str, layout: str) -> tuple[int, ...]:
    """Return the number of layers of each stage of a Megatron-LM layout. Embedding and head count as one layer each.

    The argument `key` names the text in the job file. Raises JobError if the text is not a layout, or has layers for
    multi-token prediction, which jobs do not support.
    """
    text = layout.replace(",", "")
    for repeated in (_REPEATED_GROUP, _REPEATED_LETTER):
        if len(text) + sum(len(match[1]) * int(match[2]) for match in repeated.finditer(text)) > 2 * MAX_WORKERS:
            raise JobError(f"{key} is {shorten_repr(layout)}; expected at most {MAX_WORKERS} layers")
        text = repeated.sub(lambda match: match[1] * int(match[2]), text)
    if "m" in text:
        raise JobError(f"{key} is {shorten_repr(layout)}; layers for multi-token prediction (m) are not supported")
    if not re.fullmatch(r"E[t|]*L", text):
        raise JobError(f"{key} is {shorten_repr(layout)}; expected a layout of Megatron-LM, such as "
                       f"'Et*3|(t*4|)*2,t*3|L'")
    return tuple(map(len, text.split("|")))
