import pytest

from slipstream.runtime.config import (
    ConfigError,
    ModelConfig,
    RunConfig,
    TrainingConfig,
    parse_run_config,
)


def test_defaults_and_overrides() -> None:
    config = parse_run_config(
        {}, {"seed": 3, "betas": [0.8, 0.99]}, dtype="float64", iterations=None, seed=7
    )
    assert config.model == ModelConfig()
    assert config.training == TrainingConfig(seed=7, betas=(0.8, 0.99), dtype="float64")


def test_json_there_and_back() -> None:
    config = parse_run_config(
        {"blocks": 2, "dropout": 0.1}, {"text": "some.txt", "learning_rate": 3e-4}
    )
    assert RunConfig.from_json(config.to_json()) == config
    assert "\n" not in config.to_json()


def test_options_are_a_table_of_any_keys() -> None:
    options = {"path": "train.parquet", "columns": ["text"], "mix": {"code": 0.5}}
    config = parse_run_config({}, {"options": options})
    assert (
        config.training.options == RunConfig.from_json(config.to_json()).training.options == options
    )
    assert hash(config) == hash(parse_run_config({}, {"options": options})) != hash(RunConfig())


def test_an_integer_is_a_number() -> None:
    assert parse_run_config({}, {"weight_decay": 0}).training.weight_decay == 0.0


@pytest.mark.parametrize(
    ("model", "training", "parts"),
    [
        ({"blocks": 0}, {}, ["model.blocks is 0", "a whole number from 1 to 10000"]),
        ({"blocks": 2.5}, {}, ["model.blocks is 2.5"]),
        ({"blocks": True}, {}, ["model.blocks is True"]),
        ({"width": "64"}, {}, ["model.width is '64'", "a whole number"]),
        ({"width": 2**70}, {}, ["model.width is 11805"]),
        ({"width": 130, "heads": 4}, {}, ["model.width is 130", "multiple of model.heads, 4"]),
        ({"vocabulary": 255}, {}, ["model.vocabulary is 255", "from 256"]),
        ({"vocabulary": 0, "name": "my:Model"}, {}, ["model.vocabulary is 0", "from 1"]),
        ({"dropout": 1}, {}, ["model.dropout is 1", "below 1"]),
        ({"bloks": 2}, {}, ["unknown key model.bloks", "did you mean model.blocks?"]),
        ({"xyzzy": 2}, {}, ["unknown key model.xyzzy", "known: name, blocks"]),
        (
            {},
            {"learning_rate": float("nan")},
            ["training.learning_rate is nan", "a number above 0"],
        ),
        ({}, {"learning_rate": float("inf")}, ["training.learning_rate is inf"]),
        ({}, {"learning_rate": 0}, ["training.learning_rate is 0"]),
        (
            {},
            {"betas": [0.9]},
            ["training.betas is [0.9]", "a list of 2, each a number from 0 to below 1"],
        ),
        ({}, {"betas": [0.9, float("nan")]}, ["training.betas is [0.9, nan]"]),
        (
            {},
            {"dtype": "float16"},
            ["training.dtype is 'float16'", "one of 'float32', 'float64', 'bf16'"],
        ),
        ({}, {"text": 3}, ["training.text is 3", "a text"]),
        ({}, {"text": "x" * 9999}, ["training.text is 'xxx", "...; expected"]),
        ({}, {"seed": -1}, ["training.seed is -1"]),
        (
            {},
            {"learning_rate": 10**400},
            ["training.learning_rate is 1000", "a number above 0, at most 1e6"],
        ),
        ({}, {"clip_norm": 0.0}, ["training.clip_norm is 0.0", "a number above 0, at most 1e6"]),
        (
            {},
            {"betas": [0.9, 2]},
            ["training.betas is [0.9, 2]", "a list of 2, each a number from 0 to below 1"],
        ),
        ({}, {"data": "nothing"}, ["training.data is 'nothing'", "as 'module:function'"]),
        (
            {},
            {"learning_rate_schedule": "cosin"},
            [
                "training.learning_rate_schedule is 'cosin'",
                "one of 'constant', 'linear'",
                "did you mean 'cosine'?",
            ],
        ),
        (
            {},
            {"warmup_iterations": 21},
            ["training.warmup_iterations is 21", "takes 20 iterations", "schedule_iterations"],
        ),
        (
            {},
            {"learning_rate_schedule": "wsd", "warmup_iterations": 10, "decay_iterations": 11},
            [
                "training.decay_iterations is 11; expected at most 10, as warm-up takes 10 of "
                "20 iterations"
            ],
        ),
        ({}, {"decay_iterations": 3}, ["training.decay_iterations is 3", "with 'wsd' only"]),
        (
            {},
            {"final_learning_rate": 0.1},
            ["training.final_learning_rate is 0.1", "expected another schedule"],
        ),
        ({}, {"nesterov": True}, ["training.nesterov is true; expected a momentum above 0"]),
        (
            {},
            {"parameter_groups": 3},
            ["training.parameter_groups is 3; expected a list of tables"],
        ),
        (
            {},
            {"parameter_groups": [{"parameters": "a"}, {"parameters": "b", "weight_decay": -1}]},
            ["training.parameter_groups[1].weight_decay is -1; expected a number from 0"],
        ),
        (
            {},
            {"parameter_groups": [{"parameters": "a", "weigth_decay": 0}]},
            [
                "unknown key training.parameter_groups[0].weigth_decay",
                "mean training.parameter_groups[0].weight_decay?",
            ],
        ),
        ({}, {"parameter_groups": [{"weight_decay": 0}]}, ["parameter_groups[0]", "parameters"]),
        ({}, {"skip_nonfinite": "yes"}, ["training.skip_nonfinite is 'yes'", "true or false"]),
        (
            {},
            {"degraded_ranks": True},
            ["training.degraded_ranks was removed", "is down until it is whole again"],
        ),
        ({}, {"a key - at `$.seed`": 1}, ["unknown key training.a key"]),
    ],
)
def test_refusals_name_key_value_and_expectation(
    model: dict[str, object], training: dict[str, object], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run_config(model, training)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 250
    for part in parts:
        assert part in message


def test_broken_json_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="the run configuration cannot be read"):
        RunConfig.from_json('{"model": {"blocks": 0}}')


def test_a_width_that_does_not_fit_the_heads_is_refused_wherever_it_is_read() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.width is 130; expected a multiple of model\.heads, 4"
    ):
        RunConfig.from_json('{"model": {"width": 130, "heads": 4}}')


@pytest.mark.parametrize(
    ("model", "training"),
    [
        ({"name": "my_model:Model"}, {}),
        ({}, {"tokens": "tokens.bin"}),
        ({}, {"data": "my_data:Data"}),
        ({}, {"text": "text.txt", "tokenizer": "tokenizer.json"}),
    ],
)
def test_own_models_and_data_may_have_few_tokens(model, training) -> None:
    assert parse_run_config({"vocabulary": 4, **model}, training).model.vocabulary == 4
