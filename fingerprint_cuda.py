"""The fingerprint's Triton kernel: a file of its own, since there is no Triton where there is no CUDA."""

import triton
import triton.language as tl

ROWS, COLUMNS = 8, 1024      # of a block


@triton.jit
def kernel(bits, total, rows, columns, stride, r0, c0, ma, ba, mb, bb, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Adds sum_ij bits_ij x A(r0 + i) x B(c0 + j) over some blocks to `total`, in wrapping int64."""
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    b = ((j.to(tl.int64) + c0) * mb + bb) | 1
    found = tl.zeros((COLUMNS,), tl.int64)
    for start in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        for k in tl.static_range(ROWS):
            i = (start + k).to(tl.int64)
            a = ((i + r0) * ma + ba) | 1
            x = tl.load(bits + i * stride + j, mask=(j < columns) & (i < rows), other=0)
            found += x.to(tl.int64) * a
    tl.atomic_add(total, tl.sum(found * b, 0))
