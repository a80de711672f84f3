"""What torchtitan's command line asks for and a run cannot do.

It ends with one line and exit 2, before anything starts.
"""

import importlib.util
import sys

import pytest

from tests.interop.titan_training import write_assets

installed = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torchtitan", "triton"))),
    reason="torchtitan is not installed: make neighbours",
)
COMPILED = "--compile.enable"
RANKS = ("--parallelism.tensor_parallel_degree", "2")


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    """The lines by which our program refuses.

    It runs in this process, as torchrun starts it, on CPUs.
    """
    from slipstream.cli import torchtitan
    from slipstream.runtime.models.torchtitan import training

    monkeypatch.setattr(training, "device_type", "cpu")
    monkeypatch.setenv("TITAN_ASSETS", str(write_assets(tmp_path / "assets")))
    for name, value in {
        "TITAN_DTYPE": "float32",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29400",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torchtitan, "SlipstreamTrainer", None)

    def of(*arguments):
        monkeypatch.setattr(
            sys,
            "argv",
            ["slipstream.cli.torchtitan", "--dump_folder", str(tmp_path / "out"), *arguments],
        )
        with pytest.raises(SystemExit) as ended:
            torchtitan.main()
        assert ended.value.code == 2 and not (tmp_path / "out").exists()
        return [
            line for line in capsys.readouterr().err.splitlines() if line.startswith("slipstream:")
        ]

    return of


@installed
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            (COMPILED, *RANKS),
            "--compile.enable with --parallelism.tensor_parallel_degree 2; expected one of them",
        ),
        (
            (COMPILED, "activation-checkpoint:full"),
            "--compile.enable with FullAC; expected one of them",
        ),
        (
            (COMPILED, "--parallelism.context_parallel_degree", "2"),
            "--parallelism.context_parallel_degree 2; expected 1",
        ),
        (
            ("--parallelism.data_parallel_shard_degree", "2", *RANKS),
            "--parallelism.data_parallel_shard_degree 2 (FSDP)",
        ),
        (
            ("--parallelism.tensor_parallel_degree", "3"),
            "_degree 3; expected a divisor of the model's 16 heads",
        ),
        (
            ("--training.local_batch_size", "0"),
            "--training.local_batch_size is 0; expected a number above 0",
        ),
        (
            ("--training.global_batch_size", "7"),
            "is 7; expected a multiple of the 2 samples of a micro-batch",
        ),
        (
            ("--parallelism.data_parallel_replicate_degree", "9"),
            "a step has 4 micro-batches of 2 samples, and there are 9",
        ),
        (("--parallelism.pipeline_parallel_degree", "50"), "8 layers cannot be cut into 50 stages"),
    ],
)
def test_what_options_together_ask_for(said, options, words):
    [line] = said("--module", "tests.interop.titan_config", "--config", "small", *options)
    assert words in line


@installed
@pytest.mark.parametrize("options", [(), (COMPILED,)], ids=["alone", "compiled"])
@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            "experts",
            "whose experts count tokens in their forward, and whose optimizer moves their bias",
        ),
        ("float8", "with quantized products, whose backward cannot be split"),
        ("lora", "is not trained (LoRA); expected a model that is trained as a whole"),
        (
            "fused_collectives",
            "built without parallelism inside layers: tp_gemm_backend='dist_gemm' requires",
        ),
        ("more_than_a_chain", "is more than a chain of an embedding, decoder layers and a head"),
        ("documents", "whose attention has no backward on cpu; expected a GPU"),
        (
            "factory_arguments",
            "optimizer_factory_kwargs_by_name of the optimizer; expected options of its "
            "param_groups",
        ),
        ("no_groups", "the configuration's optimizer has no param_groups"),
        ("adam", "the optimizer Adam; expected AdamW"),
        (
            "amsgrad",
            "amsgrad of the optimizer; expected of its options only betas, eps, lr, weight_decay",
        ),
        ("squares", "the loss MSELoss.Config; expected CrossEntropyLoss"),
        ("own_trainer", "OwnConfig, a Trainer of its own; expected torchtitan's"),
    ],
)
def test_what_a_configuration_is_of(said, config, words, options):
    """Alone and beside what by itself is done."""
    [line] = said("--module", "tests.interop.titan_refused", "--config", config, *options)
    assert words in line


@installed
def test_masks_in_compiled_layers_where_there_are_gpus(said, monkeypatch):
    from slipstream.runtime.models.torchtitan import training

    monkeypatch.setattr(training, "device_type", "cuda")
    [line] = said("--module", "tests.interop.titan_refused", "--config", "documents", COMPILED)
    assert (
        "--compile.enable with attention that is given masks of documents; expected one of them"
        in line
    )


@installed
@pytest.mark.parametrize(
    ("option", "seconds"), [("heartbeat-timeout", "0"), ("settle", "-1"), ("settle", "nan")]
)
def test_seconds_that_make_no_sense(said, capsys, option, seconds):
    [line] = said("--module", "llama3", "--config", "llama3_8b", f"--slipstream.{option}", seconds)
    assert f"--slipstream.{option}: {seconds}: expected 0.1 to 3600 seconds" in line
