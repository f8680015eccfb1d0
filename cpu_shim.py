"""Lets the unmodified megatron-core wheel run on a machine without CUDA, over gloo, so that every path of the trainer
is exercised on a laptop. Where CUDA exists nothing is touched: one code path serves both.

megatron-core names CUDA in five ways that a machine without it cannot serve: `device=torch.cuda.current_device()`,
the literal `device="cuda"` (schedules.py), `Tensor.cuda()` and the type string 'torch.cuda.FloatTensor' (its
optimizers), the CUDA random states of its tracker, and the stream on which the dispatch of tokens to experts copies
its counts to the host. They are answered here, in this process only.
"""
import threading

import torch
import torch._dynamo
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


def _counts_on_host(dispatcher, point, tokens_per_expert=None):
    """In place of MoEAlltoAllTokenDispatcher's copies to the host, which leave the splits of its collectives as arrays."""
    for name in ("input_splits", "output_splits", "output_splits_tp"):
        if torch.is_tensor(getattr(dispatcher, name)):
            setattr(dispatcher, name, getattr(dispatcher, name).numpy())
    return tokens_per_expert


def install():
    """Idempotent; a no-op where CUDA is available. Holds for the calling thread: call it in each that uses Megatron."""
    if torch.cuda.is_available() or hasattr(_thread, "mode"):
        return
    torch._dynamo.config.disable = True  # Megatron's @jit_fuser is torch.compile, which would call a C++ compiler
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_, **__: None  # between pipeline stages
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.manual_seed = torch.manual_seed

    from megatron.core.tensor_parallel import random
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)

    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none"
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _counts_on_host

    _thread.mode = _CudaMeansCpu()
    _thread.mode.__enter__()
