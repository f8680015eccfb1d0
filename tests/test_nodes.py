"""Several Ray nodes on one machine: who is put where, and what happens when a whole node is lost."""

import contextlib
import os
import re
import time
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

import checkpoint
import engine
import harness
import light
import placement
import scripted_engine
import scripted_server
from buffer import Ledger


@contextlib.contextmanager
def cluster(*nodes):
    """A head without anything to reserve, which the driver takes, and a node for each of the given resources."""
    env = {"PYTHONPATH": os.pathsep.join([harness.ROOT, harness.TESTS]),      # for what the nodes start
           "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(nodes[0].get("num_gpus", 0))))}
    with mock.patch.dict(os.environ, env):
        found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            ray._common.utils.reset_ray_address()         # nobody else on this machine shall come upon it
            for node in nodes:
                found.add_node(**node)
            yield found
        finally:
            ray.shutdown()
            found.shutdown()


# ---- placement --------------------------------------------------------------------------------------------
def test_ranks_of_a_node_lie_together_and_no_gpu_is_given_twice():
    """6 + 2 on two nodes of four (fake) GPUs: three ranks in a row on each node, the engines on what is left there."""
    class Probe:         # of this function: it is sent as it is, and its processes import nothing
        def where(self):
            return ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()

    args = SimpleNamespace(device="cuda")
    with cluster(*[{"num_cpus": 8, "num_gpus": 4}] * 2) as nodes:
        ray.init(address=nodes.address, logging_level="ERROR")
        trainers, engines = placement.reserve(args, "training node(s)", 2, 3, 3), placement.reserve(args, "engine(s)", 2, 1, 1)
        actors = [ray.remote(Probe).options(**option).remote() for option in [*trainers, *engines]]
        places = ray.get([actor.where.remote() for actor in actors])
        with pytest.raises(RuntimeError, match=r"no place within 0.5 s for 1 engine\(s\), each with 2 free GPU"):
            placement.reserve(args, "engine(s)", 1, 2, 1, limit=0.5)
    on = [node for node, _ in places]
    assert [len(options) for options in (trainers, engines)] == [6, 2]
    assert len(set(on[:3])) == 1 and len(set(on[3:6])) == 1 and on[0] != on[3]
    assert sorted(on[6:]) == sorted([on[0], on[3]])
    assert all(len(gpus) == 1 for _, gpus in places) and len({(node, *gpus) for node, gpus in places}) == 8


def test_a_node_says_what_it_does_not_see(model, tmp_path):
    args = SimpleNamespace(run_dir=str(tmp_path), hf_checkpoint=model)
    host, port, missing = engine.look_around(args)
    assert host == "127.0.0.1" and 20000 <= port < 32768 and missing == []
    args.run_dir = args.hf_checkpoint = "/elsewhere"
    assert engine.look_around(args)[2] == ["/elsewhere", "/elsewhere/config.json"]


# ---- loss of a node ---------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return harness.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def nodes():
    """Three of one core each: one for the training rank, two for engines."""
    with cluster(*[{"num_cpus": 1}] * 3) as found:
        yield found


def words(model, out, nodes, engines, **changes):
    return ["train_async.py", *harness.flags(model, out, "run", save_interval=2, rollout_num_gpus=engines,
                                             ray_address=nodes.address, rollout_health_check_interval=1,
                                             rollout_health_check_timeout=2, update_weight_timeout=10, **changes)]


def records(out, event):
    return [r for r in harness.read_jsonl(out / "run" / "ledger.jsonl") if r["event"] == event]


def states(out):
    return [r["state"] for r in records(out, "engine")]


def wait_for(process, condition, limit=240):
    deadline = time.time() + limit
    while not condition():
        assert process.poll() is None, process.stdout.read()[-3000:]
        assert time.time() < deadline, "the moment did not come"
        time.sleep(0.02)


def node_of(nodes, actor):
    """The node with an actor of this class: its process is a child of the node's own."""
    raylets = {node.all_processes["raylet"][0].process.pid: node for node in nodes.worker_nodes}
    return next(node for pid, node in raylets.items() for child in psutil.Process(pid).children()
                if child.cmdline() and child.cmdline()[0].startswith(f"ray::{actor}"))


@pytest.mark.drill
def test_without_a_node_of_engines_the_run_goes_on_without_one_of_trainers_it_ends_and_resumes_exactly(model, nodes, tmp_path):
    """A new node gets the lost engine. The end comes in bounded time and with the cause; on another node the run ends with the
    weights of one that nothing happened to."""
    process = harness.start("tests/scripted_server.py", words(model, tmp_path, nodes, 2, num_rollout=1000))
    wait_for(process, lambda: len(records(tmp_path, "trained")) >= 3)
    lost, before = time.time(), len(records(tmp_path, "trained"))
    nodes.remove_node(node_of(nodes, "ScriptedServer"))
    wait_for(process, lambda: len(records(tmp_path, "trained")) >= before + 6)
    assert states(tmp_path) == ["lost"] and records(tmp_path, "engine")[0]["time"] - lost < 20
    nodes.add_node(num_cpus=1)
    wait_for(process, lambda: states(tmp_path) == ["lost", "ready", "up"])
    up, again = (records(tmp_path, "engine")[i][key] for i, key in ((2, "time"), (0, "engine")))
    wait_for(process, lambda: any(r["engine"] == again and r["time"] > up for r in records(tmp_path, "submit")))

    nodes.remove_node(node_of(nodes, "TrainWorker"), allow_graceful=False)
    output, _ = process.communicate(timeout=60)            # half of what a broken group would take to be noticed
    assert process.returncode == 1
    assert re.search(r"^error: RuntimeError: training rank 0 has died: .*node", output, re.M), output[-2000:]
    assert not records(tmp_path, "drop")
    steps = max(checkpoint.complete(tmp_path / "run" / "checkpoints")) + 2      # what it did beyond is void, and done again
    words_again = words(model, tmp_path, nodes, 1, num_rollout=steps, load=tmp_path / "run")
    harness.succeed("tests/scripted_server.py", words_again, timeout=300)
    outcomes = Ledger.outcomes(str(tmp_path / "run" / "ledger.jsonl"))
    assert len(records(tmp_path, "resume")) == 1 and sorted(outcomes) == list(range(4 * steps))
    assert Counter((each["outcome"], each["step"]) for each in outcomes.values()) == {("trained", i): 4 for i in range(steps)}

    engines = scripted_engine.start(**scripted_server.ENGINE)
    try:
        light.succeed("train_async.py", harness.flags(model, tmp_path, "whole", [url for _, url in engines],
                                                      num_rollout=steps, save_interval=2))
    finally:
        scripted_engine.stop(engines)
    assert harness.same_bits(*(harness.saved_state(tmp_path, name, steps) for name in ("run", "whole")))
