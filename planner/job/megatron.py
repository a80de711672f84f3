"""Read and write Megatron-LM's `--pipeline-model-parallel-layout`, a division into stages.

An example is `Et*3|(t*2|)*29,mL`. E is the embedding, t a decoder layer, m a layer of multi-token
prediction, L the head with the loss; `|` ends a stage, `x*3` repeats a letter three times, `(..)*3`
repeats what is within, and commas mean nothing. Stages are assigned to ranks round-robin. Sources:
Megatron Core's user guide ("Custom Pipeline Model Parallel Layout", docs.nvidia.com/megatron-core)
and `megatron/core/transformer/pipeline_parallel_layer_layout.py`.
"""

import re
from collections.abc import Sequence
from itertools import groupby, pairwise

from slipstream.planner.job.toml import JobError, shorten_repr
from slipstream.schedules.layers import prefix_sums
from slipstream.schedules.schedule import MAX_WORKERS

_REPEATED_GROUP = re.compile(r"\(([^()]*)\)\*(\d{1,9})")
_REPEATED_LETTER = re.compile(r"([EtmL|])\*(\d{1,9})")


def read_layout(key: str, layout: str) -> tuple[str, ...]:
    """Return the letters of each stage of a Megatron-LM layout, such as `("Ett", "tL")`.

    `key` names the text in the job file, for errors. Raises JobError if the text is not a layout,
    or one of too many layers.
    """
    text = layout.replace(",", "")
    # Lengths are summed before anything is written out: a short text can stand for a very long one.
    for repeated in (_REPEATED_GROUP, _REPEATED_LETTER):
        grown = sum(len(match[1]) * int(match[2]) for match in repeated.finditer(text))
        if len(text) + grown > 2 * MAX_WORKERS:
            raise JobError(
                f"{key} is {shorten_repr(layout)}; expected at most {MAX_WORKERS} layers"
            )
        text = repeated.sub(lambda match: match[1] * int(match[2]), text)
    if re.fullmatch(r"E[t|]*m[tm|]*L", text) and not re.fullmatch(r"E[t|]*m+\|*L", text):
        raise JobError(
            f"{key} is {shorten_repr(layout)}; expected all layers of multi-token "
            "prediction (m) in one stage, after the decoder layers"
        )
    if not re.fullmatch(r"E[t|]*m*\|*L", text):
        raise JobError(
            f"{key} is {shorten_repr(layout)}; expected a layout of Megatron-LM, such "
            "as 'Et*3|(t*4|)*2,t*3|L'"
        )
    return tuple(text.split("|"))


def split_letters(counts: Sequence[int], decoder_layers: int) -> tuple[str, ...]:
    """Return the letters of each stage of a Megatron-LM layout, given its number of layers.

    The model has `decoder_layers` decoder layers. If the stages have as many layers in total,
    embedding and head are added to the first and the last stage. If they have two more, embedding
    and head are the first and the last layer. If they have more than that, the others are
    multi-token prediction, before the head. Raises JobError if they have fewer or just one more, or
    if embedding or head is a layer and the first or the last stage has none.
    """
    total = sum(counts)
    more = total - decoder_layers
    # Embedding and head are either both layers or both not.
    if more < 0 or more == 1:
        raise JobError(
            f"--decoder-layers {decoder_layers}: the stages have {total} layers; "
            f"expected {total}, or {total - 2} where embedding and head are layers of "
            "them, or fewer where multi-token prediction is, too"
        )
    # Embedding and head cost a stage something, but are no layers of their own.
    if more == 0:
        stages = ["t" * count for count in counts]
        stages[0] = f"E{stages[0]}"
        stages[-1] = f"{stages[-1]}L"
        return tuple(stages)
    if not counts[0] or not counts[-1]:
        raise JobError(
            "placement.layers gives the first or the last stage no layer; expected "
            "embedding and head there"
        )
    # All layers in order, cut where the stages end.
    letters = f"E{'t' * decoder_layers}{'m' * (more - 2)}L"
    return tuple(letters[first:end] for first, end in pairwise(prefix_sums(counts)))


def write_layout(stages: Sequence[str]) -> str:
    """Return the text of a Megatron-LM layout, given the letters of each stage.

    What repeats is written once, with its number.
    """
    texts = [_write_stage(stage) for stage in stages]
    parts = []
    # The last stage has no `|` after it, so it is no part of a repetition.
    for text, equal in groupby(texts[:-1]):
        count = len(list(equal))
        parts.append(f"({text}|)*{count}" if count > 1 else f"{text}|")
    return "".join(parts) + texts[-1]


def _write_stage(stage: str) -> str:
    """Return a stage's letters as text, with three or more equal ones as `t*3`."""
    parts = []
    for letter, equal in groupby(stage):
        count = len(list(equal))
        parts.append(f"{letter}*{count}" if count > 2 else letter * count)
    return "".join(parts)
