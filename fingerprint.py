"""A 64-bit fingerprint of a tensor's bits, that both sides of a weight sync compute: plain torch, on CUDA one Triton kernel.

For a slice t[r0:r1, c0:c1] of a tensor, with i and j the row and column in the whole tensor (a 1-D tensor is one row):

    f = sum_ij bits_ij * A(i) * B(j)  mod 2^64

bits_ij is the element's raw bits as a signed integer. Slices add up, so shards are compared without being gathered.
A and B are odd, so one changed element always changes f; they depend on the place, so swapped rows, columns or heads
do too. It guards against mistakes, not against an adversary.
"""
import torch

CHUNK = 1 << 21  # elements at a time: two int64 temporaries of 16 MiB
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_A = (0x9E3779B97F4A7C15, 0x632BE59BD9B4E019)
_B = (0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)


def _weights(start, stop, constants, device):
    """(i * m + b) | 1 for i in [start, stop), wrapped to int64."""
    m, b = (c - (1 << 64) if c >> 63 else c for c in constants)
    return (torch.arange(start, stop, dtype=torch.int64, device=device) * m + b) | 1


def fingerprint(t, r0=0, c0=0):
    """t: [columns] or [rows, columns], any dtype; r0, c0: where its first element lies in the whole tensor.
    Returns an int, 0 <= f < 2^64; the fingerprints of disjoint slices add up mod 2^64 to the whole tensor's."""
    return to_int(fingerprints([(t, r0, c0)]))


def to_int(value):
    """A fingerprint as `fingerprints` leaves it, int64, as 0 <= f < 2^64."""
    return int(value) & ((1 << 64) - 1)


def fingerprints(slices):
    """slices: [(t, r0, c0)], all on one device. Returns int64 [slices] there: on CUDA they may still be in the making."""
    return fingerprinter(slices)()


def fingerprinter(slices):
    """A function that finds the fingerprints of what these slices hold when it is called: what does not change from sync to sync,
    the addresses, is put together once."""
    for t, _, _ in slices:
        if t.dim() not in (1, 2):
            raise ValueError(f"fingerprint: a tensor of 1 or 2 dimensions is needed, not {tuple(t.shape)}")
    slices = [(t.detach()[None] if t.dim() == 1 else t.detach(), r0, c0) for t, r0, c0 in slices]
    if slices and slices[0][0].is_cuda:
        return on_cuda(slices)
    return lambda: torch.stack([in_torch(*piece) for piece in slices])


@torch.no_grad()
def in_torch(t, r0, c0):
    rows, columns = t.shape
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for c in range(0, columns, CHUNK):
        width = min(CHUNK, columns - c)
        b = _weights(c0 + c, c0 + c + width, _B, t.device)
        height = max(1, CHUNK // width)
        for r in range(0, rows, height):
            bits = t[r:r + height, c:c + width].contiguous().view(_BITS[t.element_size()]).to(torch.int64)
            a = _weights(r0 + r, r0 + r + bits.size(0), _A, t.device)
            total += ((bits * b).sum(1) * a).sum()
    return total


def on_cuda(slices):
    """One kernel for all slices of a dtype's width: starting one for each would take longer than reading them. It passes over
    the bits once, in their own width; the torch above would write and read 8 bytes for each three times."""
    import triton.language as tl
    from fingerprint_cuda import COLUMNS, PROGRAMS, ROWS, kernel
    if any(t.stride(1) != 1 for t, _, _ in slices if t.numel()):
        raise ValueError("fingerprint: on CUDA, columns must lie one behind the other")
    device, tables = slices[0][0].device, []
    for width, kind in {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}.items():
        lines = [(t.data_ptr(), *t.shape, t.stride(0), r0, c0, place) for place, (t, r0, c0) in enumerate(slices)
                 if t.element_size() == width and t.numel()]
        if lines:
            tables.append((kind, torch.tensor(lines, dtype=torch.int64).to(device)))
    constants = [c - (1 << 64) if c >> 63 else c for c in (*_A, *_B)]

    def run():
        totals = torch.zeros(len(slices), dtype=torch.int64, device=device)
        for kind, table in tables:
            kernel[(PROGRAMS, len(table))](table, totals, *constants, kind, ROWS, COLUMNS)
        return totals

    return run


def check_fingerprints(expected, ranks, engine):
    """Compares an engine's tensors with the trainer's. RuntimeError with the engine and the first names that differ.

    expected: {hf name: (shape, fingerprint of the whole tensor)}; ranks: one dict for each rank of the engine,
    {"<hf name>|r0:r1|c0:c1": "<16 hex digits>"}. Slices held by several ranks must agree and count once; the slices of
    a tensor must cover it exactly and add up to its fingerprint.
    """
    slices = {}
    for rank in ranks:
        for key, value in rank.items():
            if key.count("|") != 2:
                raise RuntimeError(f"engine {engine}: /weights_checker answers in SGLang's own way: start an external engine "
                                   f"by sglang_ext/serve.py")
            if slices.setdefault(key, value) != value:
                raise RuntimeError(f"engine {engine}: its ranks hold different values of {key}")
    sums, sizes = {}, {}
    for key, value in slices.items():
        name, rows, columns = key.split("|")
        (r0, r1), (c0, c1) = (map(int, span.split(":")) for span in (rows, columns))
        sums[name] = (sums.get(name, 0) + int(value, 16)) % (1 << 64)
        sizes[name] = sizes.get(name, 0) + (r1 - r0) * (c1 - c0)
    wrong = [f"{name}: only the engine has it" for name in sums.keys() - expected.keys()]
    wrong += [f"{name}: only the trainer has it" for name in expected.keys() - sums.keys()]
    for name in expected.keys() & sums.keys():
        shape, value = expected[name]
        if sizes[name] != torch.Size(shape).numel():
            wrong.append(f"{name}: the engine covers {sizes[name]} of {torch.Size(shape).numel()} elements")
        elif sums[name] != value:
            wrong.append(f"{name}: values differ")
    if wrong:
        raise RuntimeError(f"engine {engine}: {len(wrong)} of {len(expected)} tensors are not the trainer's after a "
                           f"sync: {'; '.join(sorted(wrong)[:5])}")
