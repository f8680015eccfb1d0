"""Lets the unmodified megatron-core wheel run on a machine without CUDA, over gloo, so that every path of the trainer
is exercised on a laptop. Where CUDA exists nothing is touched: one code path serves both.

megatron-core names CUDA in five ways that a machine without it cannot serve: `device=torch.cuda.current_device()`,
the literal `device="cuda"` (schedules.py), `Tensor.cuda()` and the type string 'torch.cuda.FloatTensor' (its
optimizers), the CUDA random states of its tracker, and the stream on which the dispatch of tokens to experts copies
its counts to the host. It compiles, and it gathers unequal parts, which gloo does not. They are answered here, in this
process only.
"""
import functools
import sys
import threading

import torch
from torch.overrides import TorchFunctionMode

_thread = threading.local()  # a function mode belongs to one thread; here it stays entered for the thread's life


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs)


def _no_compile(function=None, **_):
    """In place of torch.compile, Megatron's @jit_fuser: it would call a C++ compiler, and its import alone takes seconds."""
    return _no_compile if function is None else function


def _counts_on_host(dispatcher, point, tokens_per_expert=None):
    """In place of MoEAlltoAllTokenDispatcher's copies to the host, which leave the splits of its collectives as arrays."""
    for name in ("input_splits", "output_splits", "output_splits_tp"):
        if torch.is_tensor(getattr(dispatcher, name)):
            setattr(dispatcher, name, getattr(dispatcher, name).numpy())
    return tokens_per_expert


def _gather_unequal(original, x, group, output_split_sizes=None, use_global_buffer=False):
    """In place of mappings._gather_along_first_dim: gloo gathers equal sizes only, and experts have as many tokens as come."""
    if output_split_sizes is None:
        return original(x, group, output_split_sizes, use_global_buffer)
    padded = x.new_zeros(max(output_split_sizes), *x.shape[1:])
    padded[:len(x)] = x
    parts = [torch.empty_like(padded) for _ in output_split_sizes]
    torch.distributed.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes)])


def _reduce_scatter_unequal(original, x, group, input_split_sizes=None, use_global_buffer=False):
    """In place of mappings._reduce_scatter_along_first_dim, the same."""
    if input_split_sizes is None:
        return original(x, group, input_split_sizes, use_global_buffer)
    whole = x.clone()
    torch.distributed.all_reduce(whole, group=group)
    return whole.split(list(input_split_sizes))[group.rank()].clone()


def install():
    """Idempotent; a no-op where CUDA is available. Holds for the calling thread: call it in each that uses Megatron."""
    if torch.cuda.is_available() or hasattr(_thread, "mode"):
        return
    torch.compile = _no_compile
    if "torch._dynamo" in sys.modules:       # megatron, or another, has been imported before, with the real one
        torch._dynamo.config.disable = True
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_, **__: None  # between pipeline stages
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.manual_seed = torch.manual_seed

    from megatron.core.tensor_parallel import random
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)

    from megatron.core.tensor_parallel import mappings
    if not isinstance(mappings._gather_along_first_dim, functools.partial):     # another thread has done it
        mappings._gather_along_first_dim = functools.partial(_gather_unequal, mappings._gather_along_first_dim)
        mappings._reduce_scatter_along_first_dim = functools.partial(
            _reduce_scatter_unequal, mappings._reduce_scatter_along_first_dim)

    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none"
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _counts_on_host

    _thread.mode = _CudaMeansCpu()
    _thread.mode.__enter__()
