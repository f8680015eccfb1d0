"""How a weight sync lays tensors into buckets of bytes: the same rule on the trainer's side and in the engine."""

import torch

ALIGN = 16      # bytes: a tensor of any dtype may follow one of any other, and copies stay wide
FORMAT = "offbeat_buckets"      # load_format of the request is FORMAT=LIMIT
FLUSHED = "cache flushed"       # in the answer, when it was


def cut(tensors, limit):
    """tensors: [(name, dtype, shape)] -> [[(name, dtype, shape, first byte, bytes)], ...]: buckets of at most `limit` bytes, in
    order. A larger tensor has a bucket of its own."""
    plan, end = [], limit + 1
    for name, dtype, shape in tensors:
        size = torch.Size(shape).numel() * dtype.itemsize
        start = -(-end // ALIGN) * ALIGN
        if start + size > limit:
            plan.append([])
            start = 0
        plan[-1].append((name, dtype, torch.Size(shape), start, size))
        end = start + size
    return plan


def bucket_bytes(bucket):
    return bucket[-1][3] + bucket[-1][4]


def lay_out(plan, buffers, device):
    """[(bytes of the bucket, {name: tensor in it})] of a plan's buckets, in two buffers by turns: one is filled or read while the
    other is under way. buffers: a list of two, kept from sync to sync and made anew only where they are too small."""
    for turn in (0, 1):
        size = max(map(bucket_bytes, plan[turn::2]), default=0)
        if buffers[turn] is None or buffers[turn].numel() < size:
            buffers[turn] = torch.empty(size, dtype=torch.uint8, device=device)
    return [(buffers[i % 2][:bucket_bytes(bucket)],
             {name: buffers[i % 2][start:start + size].view(dtype).view(shape) for name, dtype, shape, start, size in bucket})
            for i, bucket in enumerate(plan)]
