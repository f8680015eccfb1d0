"""One file per training rank with all that a step-identical resume needs, in the same parallel layout."""
import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import get_cuda_rng_tracker


def rank_file(path):
    return os.path.join(path, f"rank{dist.get_rank():05d}.pt")


def layout(optimizer):
    return {"tensor": mpu.get_tensor_model_parallel_world_size(), "pipeline": mpu.get_pipeline_model_parallel_world_size(),
            "data": mpu.get_data_parallel_world_size(), "optimizer": type(optimizer.chained_optimizers[0]).__name__}


def inner(optimizer):
    """The torch optimizers inside Megatron's. Their parameters are the fp32 masters, or this rank's slices of them."""
    return [o.optimizer for o in optimizer.chained_optimizers]


def masters(torch_optimizer):
    return [p for group in torch_optimizer.param_groups for p in group["params"]]


def save_rank(path, ddp, optimizer, scheduler):
    """Writes path/rankNNNNN.pt: weights, fp32 masters, optimizer and scheduler state, random states. The file appears
    whole or not at all; ranks do not wait for each other."""
    os.makedirs(path, exist_ok=True)
    state = {
        "layout": layout(optimizer),
        "model": ddp.module.state_dict(),
        "masters": [[p.data for p in masters(o)] for o in inner(optimizer)],
        "optimizer": [o.state_dict()["state"] for o in inner(optimizer)],
        "scheduler": scheduler.state_dict(),
        "random": {"cpu": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states(),
                   "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None},
    }
    torch.save(state, rank_file(path) + ".tmp")
    os.replace(rank_file(path) + ".tmp", rank_file(path))


def load_rank(path, ddp, optimizer, scheduler):
    """The reverse, into objects that model.wrap made. The state comes from the file; learning rate, weight decay and
    Adam's constants stay those of the flags. ValueError when there is no such file or it has another layout."""
    if not os.path.isfile(rank_file(path)):
        raise ValueError(f"--load: {rank_file(path)} does not exist")
    state = torch.load(rank_file(path), map_location="cpu", weights_only=True)
    if state["layout"] != layout(optimizer):
        raise ValueError(f"--load {path}: saved with layout {state['layout']}, this run has {layout(optimizer)}")
    ddp.module.load_state_dict(state["model"])
    for o, saved, values in zip(inner(optimizer), state["optimizer"], state["masters"]):
        o.load_state_dict({"state": saved, "param_groups": o.state_dict()["param_groups"]})
        for p, value in zip(masters(o), values):
            p.data.copy_(value)
    scheduler.num_steps = 0
    scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["random"]["cpu"])
    if state["random"]["cuda"] is not None:
        torch.cuda.set_rng_state(state["random"]["cuda"])
    get_cuda_rng_tracker().set_states(state["random"]["tracker"])
