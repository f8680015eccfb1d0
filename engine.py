"""One SGLang server: how it is started, spoken to and stopped.

`server_command` is the command line and environment, `EngineClient` the HTTP verbs, `Server` the owner of the process,
`SGLangEngine` the same as a Ray actor. The server is SGLang as it is; `sglang_ext/` is put on its path (see there).
"""

import argparse
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import ray
import requests

import buckets

EXT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sglang_ext")


class EngineError(RuntimeError):
    """An engine failed: the message names the engine, the verb and the cause; url: which one, where that is known."""

    def __init__(self, message, url=None):
        super().__init__(message)
        self.url = url


class NoEngineLeft(EngineError):
    """Every engine is lost: the message says of each why."""


# ---- HTTP verbs -------------------------------------------------------------------------------------------
class EngineClient:
    """Control verbs of the server at `url` (http://host:port). Each takes at most `timeout` seconds (health, info: 10)
    and raises EngineError on anything but 200. One connection per call: a kept one may be closed under a call."""

    def __init__(self, url, api_key=None, timeout=120.0):
        self.url, self.timeout = url.rstrip("/"), timeout
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def call(self, method, verb, body=None, timeout=None):
        timeout = self.timeout if timeout is None else timeout
        try:
            with requests.Session() as session:
                session.trust_env = False   # a proxy of the environment has no business between trainer and engine
                answer = session.request(method, f"{self.url}/{verb}", json=body, headers=self.headers, timeout=timeout)
        except requests.Timeout:
            raise EngineError(f"engine {self.url}: {verb}: no answer within {timeout:g} s", self.url) from None
        except requests.RequestException as error:
            raise EngineError(f"engine {self.url}: {verb}: {root_cause(error)}", self.url) from None
        if answer.status_code != 200:
            text = " ".join(answer.text.split())[:500]
            raise EngineError(f"engine {self.url}: {verb}: HTTP {answer.status_code} {text}", self.url)
        return answer

    def health(self):
        """The HTTP side answers."""
        self.call("GET", "health", timeout=min(10.0, self.timeout))

    def health_generate(self, timeout=None):
        """A token comes out of the scheduler (at least 1 s)."""
        self.call("GET", "health_generate", timeout=timeout)

    def info(self):
        """dict: model_path, weight_version, ..."""
        return self.call("GET", "model_info", timeout=min(10.0, self.timeout)).json()

    def flush_cache(self, patience=0.0, timeout=None):
        """Forgets every cached prefix. The server refuses (400) while requests run or wait; one that has just answered may still
        be on its way out: `patience` seconds are given to it."""
        deadline, pause = time.monotonic() + min(patience, self.timeout), 0.001
        while True:
            try:
                return self.call("POST", "flush_cache", timeout=timeout)
            except EngineError as error:
                if "HTTP 400" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, 0.05)

    def abort_all(self):
        """Running and queued requests return with what they have, finish_reason 'abort'."""
        self.call("POST", "abort_request", {"abort_all": True})

    def init_group(self, address, port, rank_offset, world_size, name, backend):
        """Joins a broadcast group as ranks rank_offset .. + tp - 1; answers when all `world_size` ranks are there."""
        self.call("POST", "init_weights_update_group", {
            "master_address": address, "master_port": port, "rank_offset": rank_offset, "world_size": world_size,
            "group_name": name, "backend": backend})

    def update_from_distributed(self, tensors, group_name, limit, version=None, timeout=None):
        """Receives tensors [(name, dtype, shape)] (empty: those of the group's request before) from rank 0 of the group, in buckets
        of at most `limit` bytes (buckets.py), loads them, and then calls itself `version` if one is given. Returns whether the
        cached prefixes are forgotten: they are not when a request was still on its way out."""
        answer = self.call("POST", "update_weights_from_distributed", {
            "names": [name for name, _, _ in tensors], "dtypes": [str(dtype).removeprefix("torch.") for _, dtype, _ in tensors],
            "shapes": [list(shape) for *_, shape in tensors],
            "group_name": group_name, "load_format": f"{buckets.FORMAT}={limit}", "flush_cache": True,
            "weight_version": None if version is None else str(version)}, timeout=timeout)
        return buckets.FLUSHED in answer.json()["message"]

    def update_from_tensor(self, handles):
        """Loads one flattened bucket from memory of this node. handles: of each engine rank, see sync_weights.ipc_handle."""
        self.call("POST", "update_weights_from_tensor", {
            "serialized_named_tensors": list(handles), "load_format": "flattened_bucket", "flush_cache": False})

    def destroy_group(self, name):
        self.call("POST", "destroy_weights_update_group", {"group_name": name}, timeout=min(10.0, self.timeout))

    def set_version(self, version):
        """Published version: every later answer carries it as meta_info.weight_version."""
        self.call("POST", "update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    def checksums(self):
        """List, one per engine rank, of {'<hf name>|r0:r1|c0:c1': '<16 hex digits>'} (fingerprint.py)."""
        answer = self.call("POST", "weights_checker", {"action": "checksum"}).json()
        return [rank["checksums"] for rank in answer["ranks"]]

    def release_memory(self, tags=None):
        """Gives GPU memory back; tags: of 'weights', 'kv_cache', 'cuda_graph' (None: all). The server must be idle."""
        self.call("POST", "release_memory_occupation", {"tags": tags})

    def resume_memory(self, tags=None):
        """Takes the memory again; the contents of weights and cache are undefined until they are written."""
        self.call("POST", "resume_memory_occupation", {"tags": tags})


def root_cause(error):
    """'[Errno 111] Connection refused' out of the nest that requests and urllib3 build around it."""
    found = re.findall(r"\[Errno [^\]]*\] [^'\")]*|Remote end closed[^'\")]*", str(error))
    return found[-1] if found else f"{type(error).__name__}: {error}"


# ---- command line -----------------------------------------------------------------------------------------
def server_command(args, model_path, port, rank=0, host="127.0.0.1"):
    """(argv, env) of one server. args.sglang_args come later than the defaults, and argparse lets the later flag win.

    Reads args.device, colocate, bf16, seed, rollout_num_gpus_per_engine, sglang_args.
    """
    cuda, tp = args.device == "cuda", args.rollout_num_gpus_per_engine
    argv = [sys.executable, os.path.join(EXT, "serve.py"), "--skip-tokenizer-init", "--skip-server-warmup",
            "--dtype", "bfloat16" if args.bf16 else "float32", "--tp-size", str(tp),
            "--random-seed", str(args.seed + rank), "--log-level-http", "warning", "--grammar-backend", "none"]
    if not cuda:   # --sleep-on-idle: an idle scheduler else burns most of a core
        argv += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
                 "--sleep-on-idle", "--max-total-tokens", "65536", "--watchdog-timeout", "600"]
    elif args.colocate:
        argv += ["--enable-memory-saver"]       # else its memory cannot be given back
    argv += [*args.sglang_args, "--model-path", model_path, "--host", host, "--port", str(port)]
    return argv, {**server_environment(cuda, tp), "SGLANG_HEALTH_CHECK_TIMEOUT": str(int(args.rollout_health_check_timeout) + 1)}


def server_environment(cuda, tp):
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([EXT, *filter(None, [env.get("PYTHONPATH")])])   # where SGLang finds the plugin
    env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"   # /health answers at once; /health_generate still generates
    if cuda:
        env["NCCL_CUMEM_ENABLE"] = "0"   # must be the same in the trainer; SGLang sets 0 for itself
    else:
        env.update(SGLANG_USE_CPU_ENGINE="1", OMP_NUM_THREADS="1", TORCH_COMPILE_DISABLE="1", CUDA_VISIBLE_DEVICES="")
        if tp > 1:
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(i % os.cpu_count()) for i in range(tp))
    return env


def api_key(args):
    """The key that clients must send: the value of --sglang-api-key, or None."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--api-key")
    return parser.parse_known_args(args.sglang_args)[0].api_key


PORTS = range(20000, 32768)   # below those that the kernel gives to connections: one of these could be taken before it is used


def pick_port(wanted, host, who):
    """A free port of `host`, or `wanted` when given. EngineError if that is taken."""
    for port in [wanted] if wanted else random.SystemRandom().sample(PORTS, 100):      # not a seeded one: two would meet
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)   # a port in TIME_WAIT is free
            try:
                s.bind((host, port))
                return port
            except OSError as error:
                problem = error.strerror
    raise EngineError(f"{who}: start: --sglang-port: {host}:{port} is not free ({problem}); choose another"
                      + (", or leave the flag out" if wanted else ""))


def free_address():
    """(host, port) for a rendezvous on this node: loopback when it is the only one, so that nothing listens outside."""
    alone = not ray.is_initialized() or sum(node["Alive"] for node in ray.nodes()) == 1
    host = "127.0.0.1" if alone else ray.util.get_node_ip_address()
    return host, pick_port(None, host, "rendezvous")


def look_around(args):
    """On a node that shall train: (host, a free port there, what it should see and does not)."""
    wanted = args.run_dir, os.path.join(args.hf_checkpoint, "config.json")
    return *free_address(), [path for path in wanted if not os.path.exists(path)]


def last_words(path, start=0, lines=12):
    """Why a server ended, from its log beyond byte `start`: the last error line, then the last lines."""
    with open(path, errors="replace") as f:
        f.seek(start)
        text = [line.rstrip()[:300] for line in f if line.strip()]
    errors = [line for line in text if re.search(r"\w*(Error|Exception|error): \S", line)]
    return "\n".join([*(errors[-1:] or ["no error line in its log"]), f"--- end of {path}", *text[-lines:]])


# ---- the process ------------------------------------------------------------------------------------------
class Server:
    """Owns one server process, in a group of its own that dies with the owner (serve.py watches its stdin).

    Reads what `server_command` reads and args.hf_checkpoint, run_dir, sglang_port, engine_start_timeout.
    """

    def __init__(self, rank, args, gpus=None):
        """gpus: ids of the devices to use, where this process has not been given its own."""
        self.rank, self.args, self.gpus, self.process = rank, args, gpus, None
        self.log = os.path.join(args.run_dir, "logs", f"engine_{rank}.log")

    def start(self):
        """Starts the server and returns its url when it is healthy. EngineError with the cause if it is not in time."""
        args, who = self.args, f"engine {self.rank}"
        if not os.path.isfile(os.path.join(args.hf_checkpoint, "config.json")):
            raise EngineError(f"{who}: start: --hf-checkpoint {args.hf_checkpoint}: there is no config.json")
        host, _ = free_address()
        port = pick_port(args.sglang_port and args.sglang_port + self.rank, host, who)
        argv, env = server_command(args, args.hf_checkpoint, port, self.rank, host)
        self.scratch = tempfile.mkdtemp(prefix="offbeat-")   # SGLang leaves its sockets behind
        env["TMPDIR"] = env["OFFBEAT_SCRATCH"] = self.scratch
        if self.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        os.makedirs(os.path.dirname(self.log), exist_ok=True)
        with open(self.log, "a") as log:
            self.log_start = log.tell()
            self.process = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
                                            start_new_session=True)
        self.client = EngineClient(f"http://{host}:{port}", api_key(args))
        self.wait_until_healthy(who, time.monotonic() + args.engine_start_timeout)
        return self.client.url

    def wait_until_healthy(self, who, deadline):
        while True:
            if problem := self.died():
                self.stop()
                raise EngineError(f"{who}: start: {problem}")
            try:
                return self.client.health()
            except EngineError:
                time.sleep(0.1)
            if time.monotonic() > deadline:
                self.stop(grace=0)
                raise EngineError(f"{who}: start: not healthy within --engine-start-timeout "
                                  f"{self.args.engine_start_timeout:g} s: {last_words(self.log, self.log_start)}")

    def died(self):
        """None while the server runs, else why it ended: exit status and the last words of its log."""
        if self.process is None or self.process.poll() is None:
            return None
        return f"the server ended with status {self.process.returncode}: {last_words(self.log, self.log_start)}"

    def pid(self):
        return self.process.pid

    def restart(self):
        """A new process in place of one that died, hangs or answers wrongly. Returns its url."""
        self.stop(grace=0)
        return self.start()

    def stop(self, grace=1.0):
        """Ends the server and its children: SIGTERM, `grace` seconds, then SIGKILL to its process group. It has nothing
        to save, and after a SIGTERM SGLang sleeps for 5 s before it looks whether it may go."""
        if self.process is None:
            return
        if self.process.poll() is None and grace > 0:
            self.process.terminate()
            try:
                self.process.wait(grace)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)   # the id stays ours as long as one child of the group lives
        except ProcessLookupError:
            pass
        self.process.wait(10)
        shutil.rmtree(self.scratch, ignore_errors=True)


# the actor, which can be stopped while it starts; a Server is used as it is where there is no Ray
SGLangEngine = ray.remote(num_cpus=0, max_concurrency=2)(Server)
