"""How long a weight sync takes, from the driver's call to its return, beside one raw broadcast of the
same bytes between the same two GPUs.

    python scripts/bench_sync.py 0.6B 4B 8B                   two GPUs: one trains, one generates
    python scripts/bench_sync.py tiny --device cpu            a rehearsal

Last lines, one for each shape: `sync 8B 66.4 1.50` = milliseconds (median of the syncs behind the
first two) and their ratio to the raw broadcast. The comparison of fingerprints goes on while the
first requests run; its time is printed, too.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "scripts", "gpu")]
os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, os.path.join(ROOT, "scripts", "gpu"), os.environ.get("PYTHONPATH", "")])

import ray

import placement
from args import parse_args
from engine import free_address
from shapes import make_shape
from sync_weights import sync_weights
from trainer import TrainWorker


class Sender:
    """A training rank that holds random weights and no optimizer, so that every shape fits."""

    def __init__(self, args, rank, master):
        import model
        from sync_weights import WeightSender
        from watchdog import Watchdog
        os.environ["NCCL_CUMEM_ENABLE"] = "0"
        model.init_parallel(rank, args.world_size, f"tcp://{master}", 1, 1, args.seed, args.distributed_timeout)
        self.hf = model.load_hf_config(args.hf_checkpoint)
        self.sender = WeightSender(args, model.build_model(self.hf, args), self.hf)
        self.watchdog = Watchdog(f"training rank {rank}", args)

    def ready(self):
        pass

    join_engines, leave_engines = TrainWorker.join_engines, TrainWorker.leave_engines
    prepare_weights, send_weights, fingerprints = TrainWorker.prepare_weights, TrainWorker.send_weights, TrainWorker.fingerprints


class Raw:
    """One end of a broadcast of a flat buffer."""

    def time(self, rank, address, size):
        import torch
        import torch.distributed as dist
        cuda = torch.cuda.is_available()
        dist.init_process_group("nccl" if cuda else "gloo", init_method=f"tcp://{address}", rank=rank, world_size=2)
        flat, seconds = torch.zeros(size, dtype=torch.uint8, device="cuda" if cuda else "cpu"), []
        for _ in range(8):
            dist.barrier()
            started = time.perf_counter()
            dist.broadcast(flat, 0)
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[2:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", help="0.6B, 1.7B, 4B, 8B or tiny")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--syncs", type=int, default=12)
    parser.add_argument("--update-weight-buffer-size", type=int, default=2 << 30)
    options, server = parser.parse_known_args()           # --sglang-...
    placement.TrainWorker = Sender
    with tempfile.TemporaryDirectory() as folder:
        lines = [measure(shape, folder, options, server) for shape in options.shapes]
    print("\n".join(lines), flush=True)


def measure(shape, folder, options, server):
    model = make_shape(shape, folder)
    words = ["--hf-checkpoint", model, "--prompt-data", f"{model}/prompts.jsonl", "--num-rollout", "1", "--device", options.device,
             "--output-dir", folder, "--run-name", f"run-{shape}", "--rollout-max-prompt-len", "64", "--rollout-max-response-len", "64",
             "--update-weight-buffer-size", str(options.update_weight_buffer_size), "--sglang-load-format", "dummy", *server]
    args, engines = parse_args(words + ["--bf16"] * (options.device == "cuda"), "train_async.py"), []
    placement.start_ray(args)
    try:
        size = weight_bytes(model)
        raw = 1e3 * raw_broadcast(size, options.device)
        trainers, rollout = placement.launch(args, engines)
        rows = []
        for version in range(options.syncs):
            row = sync_weights(trainers, rollout, version)
            rows.append({**row, "sync/check_time": ray.get(rollout.proved.remote())})
        ms = {name: 1e3 * statistics.median(row[f"sync/{name}"] for row in rows[2:])
              for name in ("time", "pause_time", "broadcast_time", "check_time")}
        assert rows[0]["sync/bytes"] == size or options.device == "cpu"      # there weights are fp32
    finally:
        placement.stop(engines)
    print(f"{shape}: {size / 1e9:.2f} GB; first sync {1e3 * rows[0]['sync/time']:.0f} ms, then "
          + ", ".join(f"{name} {value:.1f}" for name, value in ms.items()) + f" ms; raw broadcast {raw:.1f} ms", flush=True)
    return f"sync {shape} {ms['time']:.1f} {ms['time'] / raw:.2f}"


def weight_bytes(model):
    """Of all tensors in bf16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    return 2 * sum(p.numel() for p in network.parameters())


def raw_broadcast(size, device):
    actors = [ray.remote(Raw).options(num_gpus=int(device == "cuda"), num_cpus=0).remote() for _ in range(2)]
    host, port = free_address()
    seconds = ray.get([actor.time.remote(rank, f"{host}:{port}", size) for rank, actor in enumerate(actors)], timeout=120)
    for actor in actors:
        ray.kill(actor)
    return max(seconds)


if __name__ == "__main__":
    main()
