"""The checkpoint of one training rank, and how ranks of any other layout read it.

Every rank writes one file, all at once: of each parameter its shard of the weights and, as far as it updates them, the fp32
master and the optimizer's state. A parameter is known by its Hugging Face names, which no layout changes. In the same layout a
rank reads its own file. In another one it looks into all of them: the shards of a parameter are put together, become full Hugging
Face tensors and are cut anew, by weight_map's table, the same for weights, masters and moments. That moves bits and changes none.
"""
import glob
import os
from itertools import chain

import model  # before megatron

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

import checkpoint
import weight_map


# ---- what this rank holds -------------------------------------------------------------------------------------------
def layout(optimizer):
    return {"world": dist.get_world_size(), "tp": mpu.get_tensor_model_parallel_world_size(),
            "pp": mpu.get_pipeline_model_parallel_world_size(), "ep": mpu.get_expert_model_parallel_world_size(),
            "optimizer": [type(o).__name__ for o in optimizer.chained_optimizers]}


def masters(ddp, optimizer):
    """{parameter: (fp32 master, the torch optimizer's state dict, place)} of what this rank updates. The master is the parameter
    itself, a copy, or with the distributed optimizer a slice of one of these, from element `place` of the flat parameter."""
    found = {}
    for o in optimizer.chained_optimizers:
        if isinstance(o, DistributedOptimizer):
            params = chain(*o.model_fp32_groups, *o.model_float16_groups)
            for p, master in zip(params, chain(*o.shard_fp32_groups, *o.shard_fp32_from_float16_groups)):
                found[p] = master, o.optimizer.state, o._get_model_param_range_map(p)["param"].start
        else:
            own = {id(p) for group in o.param_groups for p in group["params"]}
            for p in ddp.parameters():
                master = p if p.dtype == torch.float32 else p.main_param
                if id(master) in own:
                    found[p] = master, o.optimizer.state, 0
    return found


def blocks(param, kind, names):
    """[(kind, names)]: a parameter of stacked experts as one matrix each, so that they may come to lie on any other rank."""
    if not kind.startswith("experts_"):
        return [(kind, names)]
    each = len(names) // (mpu.get_expert_model_parallel_world_size() * len(param))
    mine = names[mpu.get_expert_model_parallel_rank() * len(param) * each:]
    return [(kind.removeprefix("experts_"), mine[i * each:(i + 1) * each]) for i in range(len(param))]


def part_of(kind):
    """(which, of how many) tensor parallel shards this rank holds."""
    if kind.startswith("experts_"):
        return mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_tensor_parallel_world_size()
    return mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()


# ---- writing --------------------------------------------------------------------------------------------------------
def save(path, ddp, optimizer, scheduler):
    """Writes file `path`: weights, masters, optimizer, scheduler, random states: what a step-identical resume needs. Returns
    {file's name: its size and checksum}."""
    owned, rows = masters(ddp, optimizer), []
    for param, kind, names in weight_map.table(ddp):
        row = {"blocks": blocks(param, kind, names), "part": part_of(kind), "shape": list(param.shape), "weights": param.data}
        if param in owned:
            master, state, place = owned[param]
            row |= {"place": place, "master": master.data, "state": dict(state.get(master, {}))}
        rows.append(row)
    state = {
        "layout": layout(optimizer), "parameters": rows, "scheduler": scheduler.state_dict(),
        "random": {"cpu": torch.get_rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
                   "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None},
    }
    return checkpoint.write(path, lambda file: torch.save(state, file))


# ---- reading --------------------------------------------------------------------------------------------------------
def load(path, ddp, optimizer, scheduler, hf):
    """The reverse, into what model.wrap() made, from this rank's file, or from all files beside it where they were written in
    another layout. Learning rate, weight decay and Adam's constants stay those of the flags. ValueError for what is missing."""
    name, files = os.path.basename(path).rpartition("_")[0], {}
    paths = sorted(glob.glob(os.path.join(glob.escape(os.path.dirname(path)), f"{name}_*.pt")))
    if not paths:
        raise ValueError(f"--load: {path} does not exist")
    first = read(paths[0])
    same = first["layout"] == layout(optimizer)
    if not same and len(paths) != first["layout"]["world"]:
        raise ValueError(f"--load: {path}: {len(paths)} ranks' files are here, {first['layout']['world']} were written")
    files = [read(path)] if same else [first, *map(read, paths[1:])]
    saved, owned = index(files), masters(ddp, optimizer)
    for param, kind, names in weight_map.table(ddp):
        (part, parts), cut = part_of(kind), blocks(param, kind, names)
        pieces = [saved.get(tuple(n)) or saved[(weight_map.EMBEDDING,)] for _, n in cut]   # a tied head is the embedding

        def fill(out, field, place=0):
            """With elements from `place` on of the flat parameter, block by block."""
            size, end, flat = param.numel() // len(cut), place + out.numel(), out.detach().view(-1)
            for i, (of, (kind_of_block, _)) in enumerate(zip(pieces, cut)):
                first, last = max(place - i * size, 0), min(end - i * size, size)
                if first < last:
                    like = param if len(cut) == 1 else param[i]
                    flat[i * size + first - place:i * size + last - place] = shard(
                        of, field, kind_of_block, like, hf, part, parts, first, last)
            return out

        fill(param, "weights")
        if param in owned:
            master, state, place = owned[param]
            fill(master, "master", place)
            scalars, moments = next((p["scalars"], p["moments"]) for p in chain(*pieces) if "moments" in p)
            state[master] = {field: fill(torch.empty_like(master), field, place) for field in moments}
            state[master] |= {field: value.clone() for field, value in scalars.items()}
    scheduler.num_steps = 0  # load_state_dict adds to it
    scheduler.load_state_dict(files[0]["scheduler"])
    if same:
        torch.set_rng_state(files[0]["random"]["cpu"])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(files[0]["random"]["cuda"])
        tensor_parallel.get_cuda_rng_tracker().set_states(files[0]["random"]["tracker"])
    elif dist.get_rank() == 0:
        print(f"{name}_*.pt were saved in the layout {first['layout']}, and are loaded into {layout(optimizer)}: random states "
              "of the ranks are not kept, all else is", flush=True)


def read(path):
    """Without reading it whole: tensors stay on the disk until they are copied."""
    if not os.path.isfile(path):
        raise ValueError(f"--load: {path} does not exist")
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def index(files):
    """{names: [piece]} of all files. A piece says of one block of a parameter which tensor parallel shard it is of, and has its
    fields as (first element, flat tensor)."""
    found = {}
    for row in (row for file in files for row in file["parameters"]):
        size = torch.Size(row["shape"]).numel() // len(row["blocks"])
        state = row.get("state", {})
        moments = [name for name, value in state.items() if value.dim()]
        flat = {"weights": (0, row["weights"].flatten())}
        if "master" in row:
            held = {"master": row["master"], **{name: state[name] for name in moments}}
            flat |= {name: (row["place"], t.flatten()) for name, t in held.items()}
        for i, (_, names) in enumerate(row["blocks"]):
            piece = {"part": row["part"], "shape": row["shape"] if len(row["blocks"]) == 1 else row["shape"][1:],
                     "fields": {name: (place - i * size, t) for name, (place, t) in flat.items()}}
            if "master" in row:
                piece |= {"moments": moments, "scalars": {k: v for k, v in state.items() if k not in moments}}
            found.setdefault(tuple(names), []).append(piece)
    return found


def shard(pieces, field, kind, like, hf, part, parts, first, last):
    """Elements first .. last - 1 of shard `part` of `parts` of one parameter, flat: as it was saved, or cut anew."""
    saved, size = pieces[0]["part"][1], torch.Size(pieces[0]["shape"]).numel()
    if saved == parts:
        return assemble(pieces, field, part, first, last)
    shards = [assemble(pieces, field, i, 0, size).view(pieces[0]["shape"]) for i in range(saved)]
    full = [view.reshape(weight_map.hf_shape(view)) for view in weight_map.to_views(kind, shards, hf)]
    return weight_map.to_shard(kind, full, like, hf, parts, part).reshape(-1)[first:last]


def assemble(pieces, field, part, first, last):
    """Elements of one saved shard, flat, from what the data parallel ranks hold of it: the same, or each a slice."""
    at, out = first, []
    held = [p["fields"][field] for p in pieces if p["part"][0] == part and field in p["fields"]]
    for place, flat in sorted(held, key=lambda piece: piece[0]):
        if place <= at < min(last, place + len(flat)):
            out.append(flat[at - place:last - place])
            at += len(out[-1])
    if at < last:
        raise ValueError(f"--load: {field} of a parameter: of elements {first} to {last} all from {at} on are in no rank's file")
    return torch.cat(out)
