"""Plans as tables of AMD Primus' pipeline runner: every micro-batch gets through, and its own runner takes them.

Primus is no package of an index: its runner is asked where its repository is on PYTHONPATH, and with it Megatron Core.
"""

import importlib.util
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.planner.plan import plan_job
from slipstream.schedules import codec
from slipstream.schedules.primus import primus_table
from slipstream.schedules.schedule import OpKind, Worker
from tests import general
from tests.generate import SHED, by_hand
from tests.interop.running import run_ranks
from tests.jobs import grid

V = "[placement]\norder = 'v'\nchunks = 2\n"
SCHEDULES = {
    "whole": plan_job(grid(1, 4, 6), method="greedy").schedule,
    "fused": plan_job(grid(1, 3, 4), method="greedy", backward="fused").schedule,
    "v": plan_job(grid(1, 2, 5, more=V), method="greedy").schedule,
    "interleaved": plan_job(grid(2, 2, 4, more=V.replace("'v'", "'interleaved'")), method="greedy").schedule,
    "re-routed": plan_job(grid(3, 3, 4), [Worker(1, 1), Worker(2, 2)], method="greedy").schedule,
    "shed": by_hand(SHED)}


class Runner:
    """What a rank of Primus does with a table: `ScheduleRunner`, and its handlers, without tensors.

    Sends and receives that follow each other are begun together, and all waited for.
    """

    def __init__(self, table):
        self.table, self.at = table, [0] * len(table)
        self.sent, self.there = set(), [set() for _ in table]
        """Tensors on their way, and what each rank has computed or received."""

    def run(self):
        while any(self.advance(rank) for rank in range(len(self.table))):
            pass
        stuck = [nodes[at] for nodes, at in zip(self.table, self.at, strict=True) if at < len(nodes)]
        assert not stuck, stuck

    def advance(self, rank):
        nodes, at = self.table[rank], self.at[rank]
        if at == len(nodes):
            return False
        if nodes[at]["func_type"][0] not in "SR" or len(nodes[at]["func_type"]) != 2:
            self.compute(rank, nodes[at])
            self.at[rank] += 1
            return True
        end = next((place for place in range(at, len(nodes)) if nodes[place]["args"] is None), len(nodes))
        batch = nodes[at:end]
        before = set(self.sent)
        for node in batch:
            if node["func_type"][0] == "S":
                assert node["args"]["from_pp_rank"] == rank
                made = "F" if node["func_type"] == "SF" else "B"
                assert (made, node["mini_batch"], node["chunk"]) in self.there[rank], node
                self.sent.add(self.name(node, node["chunk"], node["args"]["send_to_chunk"]))
        names = {self.name(node, node["args"]["recv_from_chunk"], node["chunk"]): node for node in batch
                 if node["func_type"][0] == "R"}
        if not names.keys() <= self.sent:
            return self.sent != before
        for node in names.values():
            assert node["args"]["to_pp_rank"] == rank
            self.there[rank].add((node["func_type"], node["mini_batch"], node["chunk"]))
        self.at[rank] = end
        return True

    @staticmethod
    def name(node, made, taken):
        return (node["func_type"][1], node["mini_batch"], made, taken, node["args"]["from_pp_rank"],
                node["args"]["to_pp_rank"])

    def compute(self, rank, node):
        kind, mini_batch, chunk = node["func_type"], node["mini_batch"], node["chunk"]
        needs = {"F": [], "B": ["F"], "BW": ["F"], "W": ["B"]}[kind]
        for one in needs:
            assert (one, mini_batch, chunk) in self.there[rank], node
        self.there[rank].add(("B" if kind == "BW" else kind, mini_batch, chunk))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_micro_batch_passes_every_stage(name):
    schedule = SCHEDULES[name]
    found = primus_table(schedule)
    runner = Runner(found["table"])
    runner.run()
    count = Counter(node["func_type"] for nodes in found["table"] for node in nodes)
    ops = Counter(op.kind for op in schedule.all_ops())
    assert [count[kind] for kind in ("F", "B", "W", "BW")] == [ops[kind] for kind in (OpKind.F, OpKind.I, OpKind.W,
                                                                                     OpKind.B)]
    hops = sum(schedule.grid.microbatches) * (len(schedule.grid.stages) - 1)
    assert count["SF"] == count["RF"] == count["SB"] == count["RB"] == hops
    for nodes in found["table"]:  # what a stage takes from another one is there before it computes
        there = set()
        for node in nodes:
            there.add((node["func_type"], node["mini_batch"], node["chunk"]))
            if node["func_type"] == "F" and ("RF", node["mini_batch"], node["chunk"]) not in there:
                assert node["chunk"] == 0  # of the first stage


def test_a_dead_workers_micro_batches_go_to_its_peers():
    found = primus_table(SCHEDULES["re-routed"])
    assert found["table"][1 * 3 + 1] == [] and found["pp_size"] == 9 and found["micro_batches"] == 12
    pairs = {(node["args"]["from_pp_rank"] // 3, node["args"]["to_pp_rank"] // 3)
             for nodes in found["table"] for node in nodes if node["args"]}
    assert any(source != target for source, target in pairs)  # pipelines


def test_the_command_writes_it_or_says_why_not(tmp_path):
    def export(schedule, *arguments):
        codec.write(schedule, tmp_path / "plan.json")
        return CliRunner().invoke(app, ["export", str(tmp_path / "plan.json"), "--to", "primus", *map(str, arguments)])

    done = export(SCHEDULES["v"], "--out", tmp_path / "table.json")
    assert done.exit_code == 0, done.stderr
    assert json.loads((tmp_path / "table.json").read_text()) == json.loads(json.dumps(primus_table(SCHEDULES["v"])))
    assert json.loads(export(SCHEDULES["v"]).stdout)["vpp_size"] == 2
    done = export(general.floating_layer())
    assert done.exit_code == 1 and "holds layers of its own choice" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.skipif(importlib.util.find_spec("primus") is None, reason="AMD Primus' repository is not on PYTHONPATH")
@pytest.mark.parametrize("name", SCHEDULES)
def test_its_own_runner_takes_the_table(tmp_path, monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: None)  # made at import, for offloading
    from primus.core.pipeline_parallel.scheduler.scheduler import ScheduleRunner
    from primus.core.pipeline_parallel.scheduler.scheduler_node import FuncType

    monkeypatch.chdir(tmp_path)
    Path("table.json").write_text(json.dumps(primus_table(SCHEDULES[name])))
    shown = re.search(r"```python\n(.*?class Planned.*?)```",
                      (Path(__file__).parents[2] / "docs" / "neighbours.md").read_text(), re.DOTALL)
    names = {}
    exec(shown[1], names)
    table, ran = names["planned"].generate_schedule_table(), []
    runner = ScheduleRunner({kind: lambda node, *_: ran.append(str(node)) for kind in FuncType})
    for rank in range(len(table)):
        runner.run(table, rank)
    wanted = [f"({node['func_type']}|{node['mini_batch']}|{node['chunk']})"
              for nodes in primus_table(SCHEDULES[name])["table"] for node in nodes]
    assert ran == wanted


@pytest.mark.skipif(not all(map(importlib.util.find_spec, ("primus", "megatron"))),
                    reason="AMD Primus' repository and megatron-core are not on PYTHONPATH")
@pytest.mark.parametrize("name", SCHEDULES)
def test_its_handlers_and_megatrons_steps_make_the_gradients_of_one_process(tmp_path, name):
    found = primus_table(SCHEDULES[name])
    codec.write(SCHEDULES[name], tmp_path / "plan.json")
    (tmp_path / "table.json").write_text(json.dumps(found))
    run_ranks("tests.interop.primus_ranks", found["pp_size"], str(tmp_path), seconds=250)
