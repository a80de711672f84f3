"""Read and write job files, and estimate them from models and measurements.

file              TOML to a checked `Job`
network           a job file's links, and whether reductions overlap compute
toml              reads a table key by key and checks every value; writes job files
run_keys          keys of `[model]` and `[training]` that plans depend on
layers            cost of each layer; optimizer state that a stage's holders share
model_shape       work and memory of each layer of a model, by formulas
model_config      the layers of a model from its config.json
estimate          stage times and memory from a model's layers and a GPU's data sheet
arrangement       other virtual stages for the same layers, as another job file
divisions         placements of the literature, and the best division of the layers for each
megatron          divisions into stages as Megatron-LM writes them
profiler_trace    stage times from Chrome traces
straggler_trace   op times from ByteDance's StragglerAnalysis
presets/          job files to start from
"""
