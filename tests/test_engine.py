"""The real SGLang server on the CPU through engine.py, and the scripted engine that stands in for it in other tests."""

import concurrent.futures
import os
import signal
import subprocess
import sys
import time
import types

import psutil
import pytest
import requests
import torch
import torch.distributed as dist
from safetensors import safe_open
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import buckets
import engine
import scripted_engine
from engine import EngineClient, EngineError
from fingerprint import check_fingerprints, fingerprint

torch.set_num_threads(1)
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VOCAB = 499      # not a multiple of 64: SGLang pads it
THREADS = concurrent.futures.ThreadPoolExecutor(64)


# ---- helpers ----------------------------------------------------------------------------------------------
def tiny_model(folder, seed):
    """A random Qwen3 whose every tensor matters: norms and all."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=VOCAB, tie_word_embeddings=True, max_position_embeddings=2048, bos_token_id=1,
        eos_token_id=2, pad_token_id=0, initializer_range=0.2)).float().eval()
    for p in model.parameters():
        if p.dim() == 1:
            p.data.add_(0.2 * torch.randn_like(p))
    model.save_pretrained(folder)
    return model


def make_args(model, run_dir, **changes):
    return types.SimpleNamespace(**{
        "device": "cpu", "colocate": False, "bf16": False, "seed": 1, "rollout_num_gpus_per_engine": 1,
        "sglang_args": ["--max-running-requests", "4"], "hf_checkpoint": str(model), "run_dir": str(run_dir),
        "sglang_port": None, "engine_start_timeout": 120, "rollout_health_check_timeout": 30, **changes})


def generate(url, ids, max_new_tokens, **params):
    """The request that the rollout sends."""
    body = {"input_ids": ids, "return_logprob": True, "rid": params.pop("rid", None), "sampling_params": {
        "max_new_tokens": max_new_tokens, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "skip_special_tokens": False,
        "stop_token_ids": [2], "sampling_seed": 0, **params}}
    return requests.post(f"{url}/generate", json={k: v for k, v in body.items() if v is not None}, timeout=60)


def answer(url, ids, max_new_tokens, **params):
    found = generate(url, ids, max_new_tokens, **params)
    assert found.status_code == 200, found.text
    return found.json()


@torch.no_grad()
def logprob_error(model, prompt, found, temperature=1.0):
    """Largest difference between an answer's log-probs and the model's own."""
    triples = found["meta_info"]["output_token_logprobs"]
    tokens = [token for _, token, _ in triples]
    assert tokens == found["output_ids"] and len(tokens) == found["meta_info"]["completion_tokens"]
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1:-1].double() / temperature
    own = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return (own - torch.tensor([x for x, _, _ in triples])).abs().max().item()


def prompts(count, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (5 + 7 * i,), generator=draw).tolist() for i in range(count)]


def expected(model):
    return {name: (tuple(t.shape), fingerprint(t)) for name, t in named(model)}


def named(model):
    return [(name, p.data) for name, p in model.named_parameters()]


class Source:
    """Rank 0 of a broadcast group with one engine."""

    def __init__(self, client, name):
        self.client, self.name = client, name
        port = engine.pick_port(None, "127.0.0.1", "test")
        asked = THREADS.submit(client.init_group, "127.0.0.1", port, 1, 2, name, "gloo")
        self.group = scripted_engine.join_group("gloo", "127.0.0.1", port, 0, 2, name, 60)
        asked.result(60)

    def send(self, tensors):
        """In buckets of one tensor each: a limit of one byte."""
        asked = THREADS.submit(self.client.update_from_distributed, [(name, t.dtype, t.shape) for name, t in tensors], self.name, 1)
        for _, t in tensors:
            dist.broadcast(t.contiguous().view(torch.uint8), group=self.group, group_src=0)
        return asked.result(60)

    def close(self):
        self.client.destroy_group(self.name)
        dist.destroy_process_group(self.group)


def sync(client, source, model, version):
    """A weight sync in two requests; each forgets the cached prefixes."""
    tensors = named(model)
    assert source.send(tensors[:5]) and source.send(tensors[5:])
    client.set_version(version)


def script(url, **orders):
    assert requests.post(f"{url}/script", json=orders, timeout=10).status_code == 200


def counters(url):
    return requests.get(f"{url}/script", timeout=10).json()


def until(condition, limit, what):
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {limit} s"
        time.sleep(0.02)


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE   # dead, and not yet waited for by its parent
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return folder, tiny_model(folder / "old", 0), tiny_model(folder / "new", 1)


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    """A real server with the weights "old". Tests leave it with these weights."""
    server = engine.Server(0, make_args(models[0] / "old", tmp_path_factory.mktemp("run")))
    server.start()
    yield server
    server.stop(grace=0)


@pytest.fixture
def scripted():
    """Starts scripted engines and ends them after the test: scripted(**options) -> url."""
    engines = []

    def start(**options):
        engines.extend(scripted_engine.start(1, **options))
        return engines[-1][1]

    yield start
    scripted_engine.stop(engines)


# ---- the real server --------------------------------------------------------------------------------------
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_weights_at_the_temperature(server, models, temperature):
    old = models[1]
    asked = prompts(6)
    found = list(THREADS.map(lambda ids: answer(server.client.url, ids, 24, temperature=temperature), asked))
    for ids, one in zip(asked, found):
        assert logprob_error(old, ids, one, temperature) < 1e-4
        assert one["meta_info"]["finish_reason"]["type"] in ("stop", "length")
    assert logprob_error(old, asked[0], found[0], 1.7 - temperature) > 1e-2, "the temperature does not show"


def test_an_abort_returns_what_was_generated_with_its_logprobs(server, models):
    url, asked = server.client.url, prompts(4)
    waiting = [THREADS.submit(answer, url, ids, 1500, ignore_eos=True) for ids in asked]
    time.sleep(1.5)
    server.client.abort_all()
    for ids, one in zip(asked, waiting):
        found = one.result(20)
        assert found["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(found["output_ids"]) < 1500
        assert logprob_error(models[1], ids, found) < 1e-4


@pytest.mark.contract
def test_after_a_sync_the_answers_are_the_new_weights(server, models):
    """Also of a request that came in the middle, and what was cached before is forgotten; the fingerprints see one changed
    element."""
    _, old, new = models
    client, ids = server.client, prompts(1)[0]
    client.set_version(0)
    check_fingerprints(expected(old), client.checksums(), client.url)
    answer(client.url, ids, 8)          # leaves keys and values of the old weights in the cache
    source = Source(client, "test")
    assert answer(client.url, ids, 8)["meta_info"]["cached_tokens"] == len(ids) - 1
    tensors = named(new)
    asked = THREADS.submit(client.update_from_distributed, [(name, t.dtype, t.shape) for name, t in tensors], source.name, 1, 1)
    for i, (_, t) in enumerate(tensors):
        if i == 5:                      # half of the weights are there: no token of such a mixture comes out
            waiting = THREADS.submit(answer, client.url, ids, 12)
            time.sleep(0.5)
            assert not waiting.done()
        dist.broadcast(t.contiguous().view(torch.uint8), group=source.group, group_src=0)
    assert asked.result(60) is True
    for found in (waiting.result(20), answer(client.url, ids, 24)):
        assert found["meta_info"]["weight_version"] == "1"
        assert logprob_error(new, ids, found) < 1e-4
        assert logprob_error(old, ids, found) > 0.1
    assert client.info()["weight_version"] == "1"
    check_fingerprints(expected(new), client.checksums(), client.url)
    changed = dict(named(new))["model.layers.1.self_attn.k_proj.weight"]
    changed.view(torch.int32)[3, 7] ^= 1
    with pytest.raises(RuntimeError, match="1 of 24 .*layers.1.self_attn.k_proj.weight: values differ"):
        check_fingerprints(expected(new), client.checksums(), client.url)
    changed.view(torch.int32)[3, 7] ^= 1
    source.close()
    source = Source(client, "again")    # a group can be made anew
    sync(client, source, old, 2)
    source.close()
    check_fingerprints(expected(old), client.checksums(), client.url)


def test_buckets_get_smaller_towards_the_last(monkeypatch):
    """At most 64 bytes and half of what is left, 80, 48, 24, 16, but 16 at least: of ten tensors of 16 bytes."""
    monkeypatch.setattr(buckets, "LAST", 16)
    plan = buckets.cut([(str(i), torch.float32, (2, 2)) for i in range(10)], 64)
    assert [[int(name) for name, *_ in bucket] for bucket in plan] == [[0, 1, 2, 3], [4, 5, 6], [7], [8], [9]]
    assert [[start for *_, start, _ in bucket] for bucket in plan] == [[0, 16, 32, 48], [0, 16, 32], [0], [0], [0]]


def test_experts_spread_over_an_engines_ranks_keep_their_names(tmp_path):
    """Two ranks with half of the experts each. SGLang's CPU experts cannot compute that way, so no token is asked for."""
    torch.manual_seed(3)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=VOCAB,
        tie_word_embeddings=False)).float().save_pretrained(tmp_path / "model")
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        wanted = {name: (tuple(file.get_tensor(name).shape), fingerprint(file.get_tensor(name))) for name in file.keys()}
    server = engine.Server(0, make_args(tmp_path / "model", tmp_path, rollout_num_gpus_per_engine=2,
                                        sglang_args=["--ep-size", "2"]))
    server.start()
    try:
        ranks = server.client.checksums()
    finally:
        server.stop(grace=0)
    check_fingerprints(wanted, ranks, "E")
    assert [{int(key.split(".")[5]) for key in rank if ".experts." in key} for rank in ranks] == [{0, 1, 2, 3}, {4, 5, 6, 7}]


def test_a_refused_verb_names_engine_and_verb(server):
    with pytest.raises(EngineError, match=f"engine {server.client.url}: destroy_weights_update_group: HTTP 400"):
        server.client.destroy_group("none")
    with pytest.raises(EngineError, match="engine http://127.0.0.1:9: flush_cache: .*Connection refused"):
        EngineClient("http://127.0.0.1:9").flush_cache()


def test_too_long_a_request_is_a_4xx(server, scripted):
    for url in (server.client.url, scripted(context_length=2048)):
        assert generate(url, [5] * 10, 2048).status_code == 400
        assert generate(url, [5], -1).status_code == 400
        assert generate(url, [], 5).status_code == 400


# ---- starting and ending ----------------------------------------------------------------------------------
@pytest.mark.contract
@pytest.mark.parametrize("changes, words", [
    ({"hf_checkpoint": "/no/such/model"}, "--hf-checkpoint /no/such/model: there is no config.json"),
    ({"sglang_args": ["--no-such-flag"]}, "status 2: .*unrecognized arguments: --no-such-flag"),
    ({"engine_start_timeout": 0.5}, "not healthy within --engine-start-timeout 0.5 s"),
], ids=["no model", "dies at start", "too slow"])
def test_a_server_that_does_not_start_says_why(models, tmp_path, changes, words):
    server = engine.Server(3, make_args(models[0] / "old", tmp_path, **changes))
    with pytest.raises(EngineError, match=f"(?s)engine 3: start: .*{words}"):
        server.start()
    assert server.process is None or server.process.poll() is not None


@pytest.mark.contract
def test_a_port_in_use_is_said_before_anything_starts(server, models, tmp_path):
    taken = int(server.client.url.rpartition(":")[2])
    second = engine.Server(1, make_args(models[0] / "old", tmp_path, sglang_port=taken - 1))   # engine 1 takes port + 1
    with pytest.raises(EngineError, match=f"engine 1: start: --sglang-port: 127.0.0.1:{taken} is not free"):
        second.start()
    assert second.process is None


@pytest.mark.drill
def test_kill_9_of_the_owner_leaves_no_process(models, tmp_path):
    code = ("import sys, time, types, engine\n"
            f"server = engine.Server(0, types.SimpleNamespace(**{vars(make_args(models[0] / 'old', tmp_path))}))\n"
            "server.start()\nprint(server.pid(), flush=True)\ntime.sleep(600)\n")
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                             env=dict(os.environ, PYTHONPATH=ROOT))
    main = psutil.Process(int(owner.stdout.readline()))
    pids = [main.pid, *(child.pid for child in main.children(recursive=True))]
    assert len(pids) >= 3, "server, scheduler and detokenizer"
    owner.kill()
    owner.wait(10)
    until(lambda: all(map(gone, pids)), 5, f"end of {pids}")


def test_arguments_of_the_user_come_last(tmp_path):
    args = make_args("/model", tmp_path, sglang_args=["--dtype", "bfloat16", "--api-key=k"])
    argv, env = engine.server_command(args, "/model", 1234)
    assert argv.index("bfloat16") > argv.index("float32") and argv[-2:] == ["--port", "1234"]
    assert engine.api_key(args) == "k"
    assert env["SGLANG_USE_CPU_ENGINE"] == "1"
    argv, env = engine.server_command(make_args("/model", tmp_path, device="cuda",
                                                rollout_num_gpus_per_engine=2), "/model", 1234)
    assert argv[argv.index("--tp-size") + 1] == "2"
    assert env["NCCL_CUMEM_ENABLE"] == "0" and "SGLANG_USE_CPU_ENGINE" not in env and "cpu" not in argv


# ---- the scripted engine ----------------------------------------------------------------------------------
def test_the_scripted_engine_answers_in_the_real_ones_shape(server, scripted):
    url, both = scripted(lengths=6, slots=4), []
    for u in (server.client.url, url):
        client = EngineClient(u)
        stop = answer(u, [5, 6, 7], 400, stop_token_ids=list(range(3, VOCAB)))     # any token ends it
        length = answer(u, [5, 6, 7], 5, ignore_eos=True)
        if u == url:
            script(u, lengths=2000, unit_seconds=0.01)
        waiting = [THREADS.submit(answer, u, [5, 6, 7, i], 1500, ignore_eos=True, rid=f"named {i}") for i in range(5)]
        time.sleep(1.0)
        assert generate(u, [5], 5, rid="named 0").status_code == 400      # there is one of that name
        client.abort_all()
        aborted = {one.result(20)["meta_info"]["id"]: one.result(20) for one in waiting}
        queued, = [one for one in aborted.values() if not one["output_ids"]]   # a fifth with room for four
        running = next(one for one in aborted.values() if one["output_ids"])
        assert set(aborted) == {f"named {i}" for i in range(5)}
        client.health(), client.health_generate(), client.flush_cache()
        both.append((stop, length, running, queued, client.info(), client.checksums()))
    for real, stand_in in zip(both[0][:4], both[1][:4]):
        assert real.keys() == stand_in.keys()
        assert real["meta_info"].keys() == stand_in["meta_info"].keys()
        assert real["meta_info"]["finish_reason"].keys() == stand_in["meta_info"]["finish_reason"].keys()
        assert real["meta_info"]["finish_reason"]["type"] == stand_in["meta_info"]["finish_reason"]["type"]
        assert {len(triple) for one in (real, stand_in) for triple in one["meta_info"]["output_token_logprobs"]} <= {3}
    assert both[1][4].keys() <= both[0][4].keys()
    assert isinstance(both[0][5], list) and isinstance(both[1][5], list)


@pytest.mark.parametrize("lengths", ["20", "50:10,50:30", "eos:25"])
def test_a_continued_request_gives_what_an_uninterrupted_one_gives(scripted, lengths):
    url = scripted(lengths=lengths, unit_seconds=0.0, budget=60)
    for seed in range(5):
        whole = answer(url, [5, 6, 7], 60, sampling_seed=seed)
        for cut in (1, len(whole["output_ids"]) // 2):
            head = whole["output_ids"][:cut]
            rest = answer(url, [5, 6, 7] + head, 60 - cut, sampling_seed=seed)
            assert head + rest["output_ids"] == whole["output_ids"]
            assert rest["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"][cut:]
            assert rest["meta_info"]["finish_reason"]["type"] == whole["meta_info"]["finish_reason"]["type"]
    assert answer(url, [5, 6, 7], 60, sampling_seed=98)["output_ids"] != answer(url, [5, 6, 7], 60)["output_ids"]


def test_lengths_time_slots_and_aborts(scripted):
    url = scripted(lengths="90:1,10:10", unit_tokens=5, unit_seconds=0.05, slots=100, budget=60)
    found = list(THREADS.map(lambda seed: answer(url, [5, 6], 60, sampling_seed=seed), range(300)))
    lengths = [len(one["output_ids"]) for one in found]
    assert set(lengths) == {5, 50} and 15 <= lengths.count(50) <= 50
    assert counters(url)["tokens"] == sum(lengths) and counters(url)["peak_in_flight"] > 20
    script(url, lengths="40", slots=2)      # 200 tokens at 100 a second; two at a time
    waiting = [THREADS.submit(answer, url, [5, 6], 400, sampling_seed=seed) for seed in range(4)]
    time.sleep(0.5)
    EngineClient(url).abort_all()
    tokens = sorted(len(one.result(5)["output_ids"]) for one in waiting)
    assert tokens[:2] == [0, 0] and all(0 < n < 200 for n in tokens[2:])
    assert counters(url)["aborts"] == 4
    with pytest.raises(EngineError, match="flush_cache: HTTP 400"):
        waiting = THREADS.submit(answer, url, [5, 6], 50)
        time.sleep(0.2)
        EngineClient(url).flush_cache()


def test_the_scripted_engine_takes_weights_and_shows_a_missing_flush(scripted, models):
    _, old, new = models
    url = scripted(lengths=20)
    client = EngineClient(url)
    source = Source(client, "scripted")
    sync(client, source, old, 0)
    before = answer(url, [5, 6, 7], 60)["output_ids"]
    sync(client, source, new, 1)
    after = answer(url, [5, 6, 7], 60)["output_ids"]
    assert before != after and answer(url, [5, 6, 7], 60)["meta_info"]["weight_version"] == "1"
    check_fingerprints(expected(new), client.checksums(), url)
    script(url, lengths=60, unit_seconds=0.02)
    running = THREADS.submit(answer, url, [5, 6, 7, 8], 60, sampling_seed=3)
    until(lambda: counters(url)["in_flight"] > 0, 5, "a request")
    assert not source.send(named(old))  # no flush: the cache still holds what the new weights computed
    running.result(20)
    script(url, lengths=20, unit_seconds=0.05)
    client.set_version(2)
    spoilt = answer(url, [5, 6, 7], 60)["output_ids"]
    client.flush_cache()
    assert spoilt != before and answer(url, [5, 6, 7], 60)["output_ids"] == before
    script(url, stale=True)             # says yes and keeps what it has
    sync(client, source, new, 3)
    assert answer(url, [5, 6, 7], 60)["meta_info"]["weight_version"] == "2"
    check_fingerprints(expected(old), client.checksums(), url)
    script(url, flip="model.norm.weight")
    with pytest.raises(RuntimeError, match="1 of 24 .*model.norm.weight: values differ"):
        check_fingerprints(expected(old), client.checksums(), url)
    source.close()
    assert counters(url)["verbs"][1:4] == ["update_weights_from_distributed", "update_weights_from_distributed",
                                           "update_weight_version"]


@pytest.mark.parametrize("kind", scripted_engine.ANSWERS)
def test_wrong_answers_on_order(scripted, kind):
    url = scripted(lengths=8)
    right = answer(url, [5, 6], 60)
    script(url, answers=kind, count=1)
    wrong = answer(url, [5, 6], 60)
    logprobs = [x for x, _, _ in wrong["meta_info"].get("output_token_logprobs", [])]
    assert {"wrong_logprobs": lambda: logprobs == [x - 1 for x, _, _ in right["meta_info"]["output_token_logprobs"]],
            "missing_logprobs": lambda: "output_token_logprobs" not in wrong["meta_info"],
            "null_logprobs": lambda: logprobs == [None] * 8,
            "nan_logprobs": lambda: all(x != x for x in logprobs),
            "short_logprobs": lambda: len(logprobs) == 7,
            "too_long": lambda: len(wrong["output_ids"]) == 13,
            "foreign_ids": lambda: min(wrong["output_ids"]) >= 10 ** 6,
            "old_version": lambda: wrong["meta_info"]["weight_version"] == "older"}[kind]()
    again = answer(url, [5, 6], 60)
    assert again["output_ids"] == right["output_ids"]


def test_refusals_hangs_and_deaths_on_order(scripted):
    url = scripted(lengths=50, unit_seconds=0.01)
    script(url, refuse=2, status=503)
    assert [generate(url, [5], 3).status_code for _ in range(3)] == [503, 503, 200]
    script(url, refuse=1, verb="update_weight_version")
    with pytest.raises(EngineError, match=f"engine {url}: update_weight_version: HTTP 500"):
        EngineClient(url).set_version(1)
    script(url, hang=1, verb="flush_cache")
    with pytest.raises(EngineError, match=f"engine {url}: flush_cache: no answer within 0.3 s"):
        EngineClient(url, timeout=0.3).flush_cache()
    EngineClient(url).flush_cache()
    script(url, hang=1, seconds=0.4)
    started = time.monotonic()
    assert answer(url, [5], 1) and time.monotonic() - started > 0.4
    script(url, die=1, seconds=0.1)     # in mid-generation
    with pytest.raises(requests.ConnectionError):
        generate(url, [5], 50)
    with pytest.raises(EngineError, match=f"engine {url}: health: "):
        EngineClient(url).health()


def test_a_scripted_engine_ends_with_its_parent():
    code = "import scripted_engine, time\nprint(scripted_engine.start(1)[0][0].pid, flush=True)\ntime.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                              env=dict(os.environ, PYTHONPATH=os.path.join(ROOT, "tests")))
    pid = int(parent.stdout.readline())
    assert not gone(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    until(lambda: gone(pid), 20, f"end of {pid}")
