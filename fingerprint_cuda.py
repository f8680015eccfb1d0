"""The fingerprint's Triton kernel: a file of its own, since there is no Triton where there is no CUDA."""

import triton
import triton.language as tl

ROWS, COLUMNS = 8, 1024      # of a block
PROGRAMS = 512               # for each tensor; those of a small one end at once


@triton.jit
def kernel(table, totals, ma, ba, mb, bb, TYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """For each line of the table (address, rows, columns, stride, r0, c0, its place in totals):
    totals[place] += sum_ij bits_ij x A(r0 + i) x B(c0 + j), in wrapping int64."""
    line = table + tl.program_id(1) * 7
    bits = tl.load(line).to(tl.pointer_type(TYPE))
    rows, columns, stride = tl.load(line + 1), tl.load(line + 2), tl.load(line + 3)
    r0, c0 = tl.load(line + 4), tl.load(line + 5)
    across = tl.cdiv(columns, COLUMNS)
    blocks = across * tl.cdiv(rows, ROWS)
    found = tl.zeros((COLUMNS,), tl.int64)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        j = (block % across) * COLUMNS + tl.arange(0, COLUMNS)
        of_block = tl.zeros((COLUMNS,), tl.int64)
        for k in tl.static_range(ROWS):
            i = (block // across) * ROWS + k
            x = tl.load(bits + i * stride + j, mask=j < tl.where(i < rows, columns, 0), other=0)
            of_block += x.to(tl.int64) * (((i + r0) * ma + ba) | 1)
        found += of_block * (((j + c0) * mb + bb) | 1)
    if tl.program_id(0) < blocks:
        tl.atomic_add(totals + tl.load(line + 6), tl.sum(found, 0))
