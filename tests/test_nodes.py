"""Several Ray nodes on one machine: who is put where, and what happens when a whole node is lost."""

import os
import re
import time
from types import SimpleNamespace

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

import harness
import light
import placement
import scripted_engine
import scripted_server
from buffer import Ledger


@pytest.fixture
def cluster(monkeypatch):
    """A function that starts a head without anything to reserve and a node for each of the given resources."""
    started = []
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([harness.ROOT, harness.TESTS]))     # for what the nodes start

    def start(*nodes):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(nodes[0].get("num_gpus", 0)))))
        started.append(Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}))
        ray._common.utils.reset_ray_address()       # nobody else on this machine shall find it
        for node in nodes:
            started[-1].add_node(**node)
        return started[-1]

    yield start
    ray.shutdown()
    for each in started:
        each.shutdown()


# ---- placement --------------------------------------------------------------------------------------------
def where():
    return ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()


def test_ranks_of_a_node_lie_together_and_no_gpu_is_given_twice(cluster):
    """12 + 4 on two nodes of eight (fake) GPUs: six ranks in a row on each node, the four engines on what is left there."""
    ray.init(address=cluster(*[{"num_cpus": 16, "num_gpus": 8}] * 2).address, logging_level="ERROR")
    args = SimpleNamespace(device="cuda")
    trainers, engines = placement.reserve(args, "training nodes", 2, 6, 6), placement.reserve(args, "engines", 4, 1, 1)
    assert len(trainers) == 12 and len(engines) == 4
    actors = [ray.remote(Probe).options(**option).remote() for option in [*trainers, *engines]]
    places = ray.get([actor.where.remote() for actor in actors])
    nodes = [node for node, _ in places]
    assert len(set(nodes[:6])) == 1 and len(set(nodes[6:12])) == 1 and nodes[0] != nodes[6]
    assert sorted(nodes[12:].count(node) for node in {*nodes}) == [2, 2]
    assert len({(node, *gpus) for node, gpus in places}) == 16 and all(len(gpus) == 1 for _, gpus in places)
    with pytest.raises(RuntimeError, match=r"no place within 0.5 s for 1 engine\(s\), each with 2 free GPU"):
        placement.reserve(args, "engine(s)", 1, 2, 1, limit=0.5)


class Probe:
    def where(self):
        return where()


# ---- loss of a node ---------------------------------------------------------------------------------------
CORES = [{"num_cpus": 1}] * 3          # one for each process that reserves: a node is lost with one of them


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return harness.make_model(tmp_path_factory.mktemp("model"))


def records(out, event):
    return [r for r in harness.read_jsonl(out / "run" / "ledger.jsonl") if r["event"] == event]


def states(out):
    return [r["state"] for r in records(out, "engine")]


def wait_for(process, condition, limit=90):
    deadline = time.time() + limit
    while not condition():
        assert process.poll() is None, process.stdout.read()[-3000:]
        assert time.time() < deadline, "the moment did not come"
        time.sleep(0.02)


def processes(run_dir, what):
    """The pids of the actors of a run: the training ranks', or the engines'."""
    found = []
    for p in psutil.process_iter(["cmdline"]):
        words = p.info["cmdline"] or []
        if words and words[0].startswith(f"ray::{what}"):
            found.append(p)
    return found


def node_of(cluster, what):
    """The node of the cluster that such an actor is on: its process is a child of the node's raylet."""
    raylets = {node.all_processes["raylet"][0].process.pid: node for node in cluster.worker_nodes}
    found = [raylets[p.ppid()] for p in processes(None, what) if p.ppid() in raylets]
    assert found, (what, raylets)
    return found[0]


def words(model, out, cluster, **changes):
    return ["train_async.py", *harness.flags(model, out, "run", **{
        "num_rollout": 14, "save_interval": 2, "rollout_num_gpus": 2, "ray_address": cluster.address,
        "rollout_health_check_interval": 1, "rollout_health_check_timeout": 2, "update_weight_timeout": 10, **changes})]


def check_all_trained_once(out, steps, groups=4):
    outcomes = Ledger.outcomes(str(out / "run" / "ledger.jsonl"))
    trained = [group for group in outcomes.values() if group["outcome"] == "trained"]
    assert len(trained) == groups * steps and {group["step"] for group in trained} == set(range(steps))
    assert {group["outcome"] for group in outcomes.values()} == {"trained"}
    assert [row["step"] for row in harness.metrics(out, "run")] == list(range(steps))


@pytest.mark.drill
def test_the_run_goes_on_without_a_node_of_engines_and_takes_a_new_one(model, cluster, tmp_path):
    nodes = cluster(*CORES)
    process = harness.start("tests/scripted_server.py", words(model, tmp_path, nodes, num_rollout=40))
    wait_for(process, lambda: len(records(tmp_path, "trained")) >= 3)
    lost = time.time()
    nodes.remove_node(node_of(nodes, "ScriptedServer"))
    wait_for(process, lambda: states(tmp_path) == ["lost"], 20)
    done = len(records(tmp_path, "trained"))
    wait_for(process, lambda: len(records(tmp_path, "trained")) >= done + 3, 30)
    assert states(tmp_path) == ["lost"]
    nodes.add_node(num_cpus=1)
    wait_for(process, lambda: states(tmp_path) == ["lost", "ready", "up"], 60)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output[-3000:]
    print(output[-2000:], time.time() - lost)
    check_all_trained_once(tmp_path, 40)
