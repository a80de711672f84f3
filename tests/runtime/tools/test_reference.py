import torch

from slipstream.runtime.config import parse_run_config
from slipstream.runtime.state.checksum import parameter_digest
from slipstream.runtime.tools import reference
from slipstream.runtime.tools.reference import reference_run

CONFIG = parse_run_config(
    {"blocks": 1, "width": 16, "heads": 2, "context": 16, "dropout": 0.1},
    {"batch": 4, "dtype": "float64", "learning_rate": 0.01},
)


def test_it_learns_and_repeats() -> None:
    first = reference_run(CONFIG, [2, 1], 25)
    torch.manual_seed(3)
    second = reference_run(CONFIG, [2, 1], 25)
    assert first.losses == second.losses and first.digest == second.digest
    assert len(first.losses) == 25 and first.losses[-1] < first.losses[0] - 1
    assert first.digest == parameter_digest(first.parameters)
    assert {"0.tokens.weight", "1.attention.qkv.bias", "2.logits.weight"} <= first.parameters.keys()


def test_it_computes_with_as_many_threads_as_a_worker(monkeypatch) -> None:
    used, before = [], torch.get_num_threads()
    loss = reference._compute_loss
    monkeypatch.setattr(
        reference,
        "_compute_loss",
        lambda *given: (used.append(torch.get_num_threads()), loss(*given))[1],
    )
    config = parse_run_config(
        {"blocks": 1, "width": 16, "heads": 2, "context": 16}, {"batch": 1, "threads": before + 1}
    )
    reference_run(config, [1], 1)
    assert used == [before + 1] and torch.get_num_threads() == before


def test_which_pipeline_reads_a_microbatch_matters() -> None:
    assert reference_run(CONFIG, [2, 1], 1).losses != reference_run(CONFIG, [1, 2], 1).losses


def test_a_digest_sees_names_dtypes_shapes_and_bytes() -> None:
    zeros = torch.zeros(4)
    variants = [
        {"a": zeros},
        {"b": zeros},
        {"a": zeros.view(2, 2)},
        {"a": zeros.int()},
        {"a": zeros + 1},
        {},
        {"a": zeros, "b": zeros},
    ]
    assert len({parameter_digest(variant) for variant in variants}) == len(variants)
    mixed = {"b": zeros.view(2, 2).t(), "a": torch.tensor(1.0, dtype=torch.bfloat16)}
    assert parameter_digest(mixed) == parameter_digest(dict(reversed(mixed.items())))
