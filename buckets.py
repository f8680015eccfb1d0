"""How a weight sync lays tensors into buckets of bytes: the same rule on the trainer's side and in the engine."""

import math

ALIGN = 16      # bytes: a tensor of any dtype may follow one of any other, and copies stay wide
LAST = 64 << 20 # bytes: no bucket is cut smaller, see `cut`
FORMAT = "offbeat_buckets"      # load_format of the request is FORMAT=LIMIT
FLUSHED = "cache flushed"       # in the answer, when it was


def cut(tensors, limit):
    """tensors: [(name, dtype, shape)] -> [[(name, dtype, shape, first byte, bytes)], ...]: buckets of at most `limit` bytes, in
    order. A larger tensor has a bucket of its own. A bucket is at most half of what is left, down to LAST bytes: nothing flies
    while the first one is filled and the last one loaded."""
    sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in tensors]
    left, plan, room, end = sum(sizes), [], 0, 1
    for (name, dtype, shape), size in zip(tensors, sizes):
        start = -(-end // ALIGN) * ALIGN
        if start + size > room:
            plan.append([])
            start, room = 0, min(limit, max(left // 2, LAST))
        plan[-1].append((name, dtype, tuple(shape), start, size))
        end, left = start + size, left - size
    return plan


def bucket_bytes(bucket):
    return bucket[-1][3] + bucket[-1][4]


def lay_out(plan, buffers, device):
    """[(bytes of the bucket, {name: tensor in it})] of a plan's buckets, in two buffers by turns: one is filled or read while the
    other is under way. buffers: a list of two, kept from sync to sync and made anew only where they are too small."""
    import torch        # here alone: an engine's actor needs the constants, and would start seconds later
    for turn in (0, 1):
        size = max(map(bucket_bytes, plan[turn::2]), default=0)
        if buffers[turn] is None or buffers[turn].numel() < size:
            buffers[turn] = torch.empty(size, dtype=torch.uint8, device=device)
    return [(buffers[i % 2][:bucket_bytes(bucket)],
             {name: buffers[i % 2][start:start + size].view(dtype).view(shape) for name, dtype, shape, start, size in bucket})
            for i, bucket in enumerate(plan)]
