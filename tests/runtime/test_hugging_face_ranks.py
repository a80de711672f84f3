"""Decoder layers over the ranks of a worker.

They have the gradients of one process, and then its training, with failures.
"""

import json
from collections import deque
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch.autograd.graph import saved_tensors_hooks

from slipstream.planner.job.model_shape import experts_shape
from slipstream.runtime.models.layered_model import build_model
from slipstream.runtime.models.split_backward import backward_input, deferring_weights
from slipstream.runtime.ranks.worker_group import simulating_rank
from slipstream.runtime.tensor_codec import read_tensors
from tests.runtime.failing import at, dead
from tests.runtime.rank_gradients import file_of, find_on_ranks, whole_gradients
from tests.runtime.test_hugging_face import CPU, CUT, EVEN, KINDS, configured
from tests.runtime.test_settling import phases, train

CASES = [(kind, recompute, 2) for recompute in ("none", ["attention", "mlp"]) for kind in CUT]


def config_of(folder: Path, kind: str, recompute: object, ranks: int, **more: object):
    path = folder / f"{kind}.json"
    path.write_text(json.dumps({"model_type": kind, **KINDS[kind], **EVEN, **more}))
    return configured(path, recompute=recompute, tensor_parallel=ranks, batch=2)


@pytest.fixture(scope="module")
def found(fork_server, tmp_path_factory):
    """A folder with what two ranks have found of each case."""
    folder = tmp_path_factory.mktemp("gradients")
    find_on_ranks([config_of(folder, *case) for case in CASES], folder, fork_server)
    return folder


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_one_process(case, found):
    alone = whole_gradients(config_of(found, *case[:2], 1), None)
    for rank in range(2):
        ours = read_tensors(file_of(found, CASES.index(case), rank))
        assert ours.keys() == alone.keys()
        for name, gradient in alone.items():
            torch.testing.assert_close(ours[name], gradient, rtol=0, atol=1e-12, msg=name)


def kept_by_experts(ranks: int, width: int, folder: Path) -> tuple[float, float]:
    """Bytes that the experts of a rank keep for their backward, and then for W."""
    config = config_of(
        folder, "mixtral", "none", ranks, intermediate_size=width, num_key_value_heads=4
    )
    found, work = dict[int, int](), deque()
    with simulating_rank(ranks):
        mixture = build_model(config.model, 0, torch.float64, CPU).build(1).layer.mlp
        value = torch.randn(2, 16, 16, dtype=torch.float64, requires_grad=True)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, torch.nn.Parameter):
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with deferring_weights(work), saved_tensors_hooks(keep, lambda tensor: tensor):
            output = mixture(value)
        backward_input([output], [torch.ones_like(output)], work)
    stashed = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for node in work
        if isinstance(node, partial)
        for tensor in node.args[1].args[:2]
    }
    return sum(found.values()), sum(stashed.values())


def test_a_rank_has_room_for_all_tokens_that_may_choose_its_experts(tmp_path):
    # By the estimate, what grows with the width of experts is the same on two ranks as on one, and
    # half on four.
    kept = {}
    for ranks in (1, 2, 4):
        wide, narrow = (kept_by_experts(ranks, width, tmp_path) for width in (48, 24))
        kept[ranks] = [large - small for large, small in zip(wide, narrow, strict=True)]
    assert kept[2] == kept[1] == [2 * bytes_ for bytes_ in kept[4]]
    wide, narrow = (
        experts_shape(16, width, number=4, chosen=2, gated=True).worst_case_bytes(1)
        for width in (48, 24)
    )
    grown = [large - small for large, small in zip(wide, narrow, strict=True)]
    of_bfloat16, tokens = 4, 32
    assert kept[1][1] == of_bfloat16 * tokens * grown[1]
    wide = experts_shape(16, 48, number=4, chosen=2, gated=True)
    assert [
        wide.worst_case_bytes(ranks)[1] / ranks / wide.stash for ranks in (2, 4)
    ] == pytest.approx([1, 0.5], rel=0.05)


@pytest.mark.slow
def test_experts_of_two_ranks_move_with_their_layers(fork_server, tmp_path):
    config = config_of(tmp_path, "qwen3_moe", "none", 2, num_hidden_layers=6)
    training = replace(
        config.training,
        iterations=60,
        clip_norm=1.6,
        evaluate_every=10,
        validation_text=__file__,
        shard_optimizer=True,
    )
    result, events, _ = train(
        [at("1.2", 2, "O")],
        fork_server,
        tmp_path / "run",
        config=replace(config, training=training),
        # Norms are in float32: a last bit of float64, by another order of sums, becomes one there.
        tolerance=1e-5,
    )
    assert dead(result) == ["1.2"] and phases(events) == ["whole", "at once", "settled"]
