"""A Megatron-core GPT in the shape of a Hugging Face Llama, Qwen2, Qwen3 or Qwen3-MoE, without Transformer Engine and apex.

The way of a micro-batch: pack() lays samples end to end; run() drives Megatron's pipeline schedule, which calls
forward(); the last stage's hidden states at response positions go to the caller's loss function, which turns them into
log-probabilities with token_logprobs(). Gradients are summed over micro-batches and data parallel ranks and divided by
nothing: the loss carries its own, global, denominator.
"""
import datetime
import functools
import inspect
import json
import logging
import math
import os
import warnings
from contextlib import nullcontext
from dataclasses import dataclass

import cpu_shim

for module in ("megatron", "torch.distributed.c10d_logger", "cpu_shim"):  # no apex: by design; deprecations in megatron
    warnings.filterwarnings("ignore", module=module)
cpu_shim.install()
logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region)
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch.utils.checkpoint import checkpoint

import weight_map

SUPPORTED = ("llama", "qwen2", "qwen3", "qwen3_moe")
moe_utils.te_general_gemm = None  # without Transformer Engine the router would find no such name; None is the torch way


# ---- processes ------------------------------------------------------------------------------------------------------
def init_parallel(rank, world_size, init_method, tp, pp, seed, timeout_s, ep=1):
    """torch.distributed (NCCL on CUDA, gloo elsewhere) and Megatron's groups; data parallel size = world / (tp * pp).
    Each expert parallel group is ep neighbouring data parallel ranks; an expert's own matrices are split as the others
    are, over the tp ranks. init_method: "tcp://host:port" of rank 0. timeout_s: seconds that joining and each
    collective may take."""
    cpu_shim.install()  # again, for this thread
    if world_size % (tp * pp):
        raise ValueError(f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp} = {tp * pp} does "
                         f"not divide the {world_size} training ranks")
    if world_size // (tp * pp) % ep:
        raise ValueError(f"--expert-model-parallel-size {ep} does not divide the {world_size // (tp * pp)} data-parallel ranks")
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl" if cuda else "gloo", init_method=init_method, rank=rank, world_size=world_size,
                            timeout=datetime.timedelta(seconds=timeout_s))
    mpu.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep, create_gloo_process_groups=False,
                                  distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)))
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


# ---- configuration --------------------------------------------------------------------------------------------------
def load_hf_config(path):
    """The transformers config of a Hugging Face directory. ValueError, one line, for what is not supported."""
    from transformers import AutoConfig
    file = os.path.join(path, "config.json")
    if not os.path.isfile(file):
        raise ValueError(f"--hf-checkpoint {path}: no config.json there; give a Hugging Face model directory")
    with open(file) as f:
        model_type = json.load(f).get("model_type")
    if model_type not in SUPPORTED:
        raise ValueError(f"--hf-checkpoint {path}: model_type {model_type!r} is not supported; supported: "
                         f"{', '.join(SUPPORTED)}")
    hf = AutoConfig.from_pretrained(path)
    check_supported(hf)
    return hf


def check_supported(hf):
    """ValueError, one line, when this file would compute something else than transformers does."""
    rope = hf.rope_parameters
    if rope["rope_type"] not in ("default", "linear", "llama3") or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"--hf-checkpoint: rope_parameters {rope} are not supported; supported rope types: default, "
                         "linear, llama3, over the whole head")
    if hf.hidden_act != "silu":
        raise ValueError(f"--hf-checkpoint: hidden_act {hf.hidden_act!r} is not supported; supported: silu")
    for flag in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if hf.to_dict().get(flag):
            raise ValueError(f"--hf-checkpoint: {flag}=true in config.json is not supported")
    if hf.model_type == "qwen3_moe":
        if hf.decoder_sparse_step != 1 or hf.mlp_only_layers:
            raise ValueError(f"--hf-checkpoint: decoder_sparse_step {hf.decoder_sparse_step} and mlp_only_layers "
                             f"{hf.mlp_only_layers} are not supported: every layer must have experts (1 and [])")
        if not 1 < hf.num_experts_per_tok <= hf.num_experts:
            raise ValueError(f"--hf-checkpoint: num_experts_per_tok {hf.num_experts_per_tok} of num_experts {hf.num_experts} is "
                             "not supported: at least 2")


def inverse_frequencies(hf):
    """[head_dim / 2] fp32: transformers' own numbers, so that scaled rotary embeddings agree with it to the bit."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    rope = hf.rope_parameters
    if rope["rope_type"] != "default":
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](hf, "cpu")[0]
    exponent = torch.arange(0, head_dim(hf), 2, dtype=torch.int64, device="cpu").float() / head_dim(hf)
    return 1.0 / rope["rope_theta"] ** exponent


def head_dim(hf):
    return hf.to_dict().get("head_dim") or hf.hidden_size // hf.num_attention_heads


def check_layout(hf, args):
    """ValueError, one line, when a size of the model does not divide by its parallel size."""
    tp, pp, ep = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.expert_model_parallel_size
    moe = hf.model_type == "qwen3_moe"
    inner = "moe_intermediate_size" if moe else "intermediate_size"
    for what in ("num_attention_heads", "num_key_value_heads", inner):
        if getattr(hf, what) % tp:
            raise ValueError(f"--tensor-model-parallel-size {tp} does not divide the model's {what} {getattr(hf, what)}")
    if hf.num_hidden_layers % pp:
        raise ValueError(f"--pipeline-model-parallel-size {pp} does not divide the model's {hf.num_hidden_layers} "
                         "layers")
    if ep > 1 and not moe:
        raise ValueError(f"--expert-model-parallel-size {ep}: {hf.model_type} has no experts")
    if moe and hf.num_experts % ep:
        raise ValueError(f"--expert-model-parallel-size {ep} does not divide the model's num_experts {hf.num_experts}")
    if moe and tp > 1 and not args.sequence_parallel:
        raise ValueError(f"--tensor-model-parallel-size {tp} with experts needs --sequence-parallel: Megatron's token dispatch "
                         "does")


def megatron_config(hf, args):
    """Reads of args: tensor_model_parallel_size, pipeline_model_parallel_size, expert_model_parallel_size,
    sequence_parallel, bf16 and recompute_granularity ("full" or None)."""
    check_layout(hf, args)
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    full_recompute = args.recompute_granularity == "full"
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=head_dim(hf),
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=hf.model_type == "qwen2",
        qk_layernorm=hf.model_type in ("qwen3", "qwen3_moe"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        sequence_parallel=args.sequence_parallel and tp > 1,
        pipeline_dtype=dtype,
        variable_seq_lengths=pp > 1,           # micro-batches are packed to different lengths
        moe_token_dispatcher_type="alltoall",  # dense too: the default refuses variable_seq_lengths
        batch_p2p_sync=False,                  # True would synchronize the device at each hop
        params_dtype=dtype,
        bf16=args.bf16,
        recompute_granularity="full" if full_recompute else None,
        recompute_method="uniform" if full_recompute else None,
        recompute_num_layers=1 if full_recompute else None,
        use_cpu_initialization=not torch.cuda.is_available(),
        # True although weights are loaded: the initialiser also marks parameters as tensor parallel; without the marks
        # the gradient norm counts the shards of one rank only
        perform_initialization=True,
        calculate_per_token_loss=True,  # nobody divides gradients or the loss: neither DDP nor the schedule
        # these need apex or Transformer Engine
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **(expert_fields(hf, args) if hf.model_type == "qwen3_moe" else {}),
    )


def expert_fields(hf, args):
    """What the configuration of a mixture of experts has besides."""
    return dict(
        num_moe_experts=hf.num_experts,
        moe_router_topk=hf.num_experts_per_tok,
        moe_ffn_hidden_size=hf.moe_intermediate_size,
        # the softmax of the chosen is the softmax of all divided by their sum, which is norm_topk_prob
        moe_router_pre_softmax=not hf.norm_topk_prob,
        # as transformers and SGLang do: logits in the model's dtype, softmax in fp32. In fp32 they would be ordered
        # where the engine sees a tie
        moe_router_dtype=None,
        moe_router_load_balancing_type="none",  # no loss but the policy's; no token is ever dropped
        expert_model_parallel_size=args.expert_model_parallel_size,
    )


# ---- the model ------------------------------------------------------------------------------------------------------
class RMSNorm(torch.nn.Module):
    """Megatron's own torch norm refuses sequence_parallel. Its keyword arguments are the layer spec's."""

    def __init__(self, config, hidden_size, eps=1e-6, **_):
        super().__init__()
        device = torch.cuda.current_device()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # finalize_model_grads sums these over TP

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@functools.cache
def varlen_attention():
    """torch's flash attention of packed sequences. Imported where there is a GPU to run it: it brings torch's compiler along."""
    from torch.nn.attention.varlen import varlen_attn
    # torch before 2.12 has no such switch: its kernel takes fewer key-value heads without being told
    switch = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    return functools.partial(varlen_attn, **switch)


class PackedAttention(MegatronModule):
    """Causal attention of packed sequences: varlen flash attention on CUDA, one SDPA call per sequence elsewhere
    (and for fp32, which the flash kernel does not take). q [T, 1, heads, dim] -> [T, 1, heads * dim]."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_):
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(self, q, k, v, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None):
        p, (q, k, v) = packed_seq_params, (x.squeeze(1) for x in (q, k, v))
        if q.is_cuda and q.dtype is not torch.float32:
            out = varlen_attention()(q, k, v, p.cu_seqlens_q, p.cu_seqlens_kv, p.max_seqlen_q, p.max_seqlen_kv,
                                     scale=self.scale, window_size=(-1, 0))
        else:
            lengths = p.cu_seqlens_q.diff().tolist()
            out = torch.cat([self.one_sequence(*qkv) for qkv in zip(*(x.split(lengths) for x in (q, k, v)))])
        return out.reshape(out.size(0), 1, -1)

    def one_sequence(self, q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, length, dim]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale,
                                             enable_gqa=q.size(1) != k.size(1))
        return out[0].transpose(0, 1)


class Experts(torch.nn.Module):
    """This rank's experts, in two tensors, and one grouped product for each. Megatron's own needs a CUDA package for that, and
    without it loops over the experts: 128 of a layer would be 128 small products, and as many collectives of a sync.

    linear_fc1 [experts, 2 * inner / tp, hidden], each [its gate rows; its up rows]; linear_fc2 [experts, hidden, inner / tp].
    """

    def __init__(self, num_local_experts, config, pg_collection=None, **_):
        super().__init__()
        inner = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        for name, rows, columns, split in (("linear_fc1", 2 * inner, config.hidden_size, 1),
                                           ("linear_fc2", config.hidden_size, inner, 2)):
            weight = torch.empty(num_local_experts, rows, columns, dtype=config.params_dtype, device=torch.cuda.current_device())
            self.register_parameter(name, torch.nn.Parameter(config.init_method(weight)))
            parameter = getattr(self, name)
            set_tensor_model_parallel_attributes(parameter, True, split, 1)  # for the gradient norm: no rank has another's
            parameter.allreduce = config.expert_model_parallel_size == 1     # else summed over those who hold the same ones

    def forward(self, x, tokens_per_expert, probs):
        """x [N, hidden]: what was sent to these experts, expert after expert; probs [N]: how much each counts."""
        ends = tokens_per_expert.cumsum(0).to(x.device, torch.int32)
        gate, up = F.grouped_mm(x, self.linear_fc1.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        inner = (F.silu(gate) * up * probs[:, None]).to(x.dtype)
        return F.grouped_mm(inner, self.linear_fc2.transpose(1, 2), offs=ends), None


def build_model(hf, args):
    """This rank's pipeline stage, tensor parallel shard and experts, on its device, in training mode, with random weights. In
    bf16 it is wrapped in Megatron's Float16Module. Reads the fields of args that megatron_config names."""
    config = megatron_config(hf, args)
    layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm,
                                     normalization="RMSNorm")
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if config.num_moe_experts:
        layer.submodules.mlp.submodules.experts = Experts
    block = TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=math.ceil(hf.vocab_size / config.tensor_model_parallel_size) * config.tensor_model_parallel_size,
        max_sequence_length=hf.max_position_embeddings,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="rope",
    )
    device = torch.device(torch.cuda.current_device())
    gpt.to(device)
    gpt.true_vocab_size = hf.vocab_size
    gpt.inverse_frequencies = inverse_frequencies(hf).to(device)
    return Float16Module(config, gpt) if config.bf16 else gpt


def load_weights(model, hf, path):
    """Streams the safetensors files of a Hugging Face directory into this rank's shards, one parameter at a time."""
    from safetensors import safe_open
    names = sorted(n for n in os.listdir(path) if n.endswith(".safetensors"))
    if not names:
        raise ValueError(f"--hf-checkpoint {path}: no *.safetensors files there")
    files = [safe_open(os.path.join(path, n), framework="pt", device="cpu") for n in names]
    where = {key: f for f in files for key in f.keys()}

    def get_tensor(name):
        if name not in where:
            raise ValueError(f"--hf-checkpoint {path}: no tensor {name} in its safetensors files")
        return where[name].get_tensor(name)

    weight_map.load(model, hf, get_tensor)


def wrap(model, args):
    """(ddp, optimizer, scheduler). An update: ddp.zero_grad_buffer(), optimizer.zero_grad(), run(), optimizer.step()
    -> (ok, gradient norm before clipping, zeros), scheduler.step(1).
    args, Megatron's flags: lr, min_lr, lr_decay_style, lr_warmup_iters, lr_decay_iters, weight_decay, adam_beta1,
    adam_beta2, adam_eps, clip_grad, use_distributed_optimizer."""
    if args.lr_decay_style != "constant" and args.lr_decay_iters is None:
        raise ValueError(f"--lr-decay-style {args.lr_decay_style} needs --lr-decay-iters")
    config = unwrap_model(model).config
    # no overlap_grad_reduce: it counts each parameter's gradients, and the head's come once per chunk of rows
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=args.use_distributed_optimizer,
        overlap_grad_reduce=False, check_for_nan_in_grad=True), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(  # clip_grad 0 would skip computing the norm, too
        optimizer="adam", lr=args.lr, min_lr=args.min_lr, weight_decay=args.weight_decay, adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2, adam_eps=args.adam_eps, clip_grad=args.clip_grad or math.inf, bf16=config.bf16,
        params_dtype=config.params_dtype, use_distributed_optimizer=args.use_distributed_optimizer),
        [ddp], use_gloo_process_groups=False)
    # also what keeps weight decay away from norms and biases: it alone applies the groups' wd_mult
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=args.lr, min_lr=args.min_lr, lr_warmup_steps=args.lr_warmup_iters,
        lr_decay_steps=max(args.lr_decay_iters or 0, args.lr_warmup_iters + 1), lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay, end_wd=args.weight_decay, wd_incr_steps=1, wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True)  # a resume obeys the flags
    # num_tokens is what Megatron would divide the gradients by
    config.finalize_model_grads_func = lambda models, num_tokens, **kw: finalize_model_grads(models, None, **kw)
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = ddp.no_sync
    return ddp, optimizer, scheduler


# ---- micro-batches --------------------------------------------------------------------------------------------------
@dataclass
class PackedBatch:
    ids: torch.Tensor             # [1, T] the samples' tokens, end to end
    positions: torch.Tensor       # [T] each sample counts from 0
    layout: PackedSeqParams       # where each sample begins
    response_index: torch.Tensor  # [N] rows whose logits predict response tokens, sample after sample
    labels: torch.Tensor          # [N] those response tokens
    response_lengths: list        # response tokens of each sample; they add up to N


def pack(samples, device, align=1):
    """samples: [(tokens, response_length)], the last response_length of the tokens being the response.
    align: T becomes a multiple of it (sequence parallel needs the tensor parallel size), by a last dummy sequence."""
    ids, index, lengths, start = [], [], [], 0
    for i, (tokens, response_length) in enumerate(samples):
        if not 0 <= response_length < len(tokens):
            raise ValueError(f"sample {i} of a micro-batch: {response_length} response tokens of {len(tokens)} tokens; "
                             "at least one prompt token is needed")
        ids += tokens
        index += range(start + len(tokens) - response_length - 1, start + len(tokens) - 1)
        lengths.append(len(tokens))
        start += len(tokens)
    dummy = -start % align if samples else align  # no samples: a rank that has to take part with nothing to add
    if dummy:
        lengths.append(dummy)
        ids += [0] * dummy
    ids = torch.tensor(ids, dtype=torch.long)
    index = torch.tensor(index, dtype=torch.long)
    starts = torch.tensor([0] + lengths).cumsum(0).to(device=device, dtype=torch.int32)
    layout = PackedSeqParams(  # not "thd": that would make Megatron rotate sequence by sequence, in every layer
        qkv_format="sbhd", cu_seqlens_q=starts, cu_seqlens_kv=starts,
        max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    return PackedBatch(ids[None].to(device), positions.to(device), layout, index.to(device), ids[index + 1].to(device),
                       [n for _, n in samples])


def forward(model, packed):
    """-> the last stage's hidden states [N, hidden] after the final norm, at the response positions only, alike on all
    tensor parallel ranks (their gradient, too, must be alike); on other stages the stage's output."""
    gpt = unwrap_model(model)
    # The two places where a packed batch differs from Megatron's picture of one: rotary angles per token, and no
    # vocabulary head (its logits of a whole batch would not fit; token_logprobs applies it).
    angles = torch.outer(packed.positions.float(), gpt.inverse_frequencies)
    angles = torch.cat([angles, angles], dim=-1)[:, None, None]  # [T, 1, 1, head_dim]
    gpt.rotary_pos_emb.forward = lambda *_, **__: angles
    if gpt.post_process:
        gpt.output_layer.forward = functools.partial(_response_rows, gpt.config.sequence_parallel, packed.response_index)
    keep_bf16 = {"fp32_output": False} if gpt.config.bf16 else {}
    out = model(packed.ids, None, None, packed_seq_params=packed.layout, **keep_bf16)
    return out[0] if gpt.post_process else out


def _response_rows(sequence_parallel, index, hidden, weight=None, runtime_gather_output=None):
    if sequence_parallel:  # [T / tp, 1, hidden] -> [T, 1, hidden]; backward: each rank keeps its rows of the gradient
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    return hidden.index_select(0, index), None


# ---- the vocabulary head --------------------------------------------------------------------------------------------
class _Logits(torch.autograd.Function):
    """hidden [n, h] x weight [v, h] -> logits [n, v] in fp32, also of bf16: as bf16 a logit of 20 is rounded by up to 1/16, and
    the log-prob is off by as much. The gradients have the operands' type."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        if hidden.is_cuda and hidden.dtype != torch.float32:
            return torch.mm(hidden, weight.T, out_dtype=torch.float32)  # what the GPU sums up in anyway
        return F.linear(hidden.float(), weight.float())

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        grad = grad.to(hidden.dtype)
        return grad @ weight, grad.T @ hidden


class _LabelLogprob(torch.autograd.Function):
    """log p(label) and entropy [n] of logits [n, v] whose columns are split over the tensor parallel ranks.
    d logp / dx_j = [j = label] - p_j;  d H / dx_j = -p_j (log p_j + H)."""

    @staticmethod
    def forward(ctx, logits, labels):
        group, width = mpu.get_tensor_model_parallel_group(), logits.size(-1)
        top = logits.max(dim=-1, keepdim=True).values
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        x = logits - top
        e = x.exp()
        local = labels - mpu.get_tensor_model_parallel_rank() * width
        mine = (local >= 0) & (local < width)
        local = local.clamp(0, width - 1)[:, None]
        sums = torch.stack([e.sum(-1), (e * x).sum(-1), x.gather(-1, local)[:, 0] * mine])
        dist.all_reduce(sums, group=group)
        log_z = sums[0].log()
        entropy = log_z - sums[1] / sums[0]
        ctx.save_for_backward(x.sub_(log_z[:, None]), local, mine, entropy)
        return sums[2] - log_z, entropy

    @staticmethod
    def backward(ctx, grad_logp, grad_entropy):
        logp, local, mine, entropy = ctx.saved_tensors
        grad = logp.exp().mul_((logp + entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_logp[:, None])).neg_()
        return grad.scatter_add_(-1, local, (grad_logp * mine)[:, None]), None


def token_logprobs(model, hidden, labels, temperature, chunk=1024, entropy=False):
    """log p(label) [N] in fp32 under softmax(logits / temperature), and its entropy [N] (nats) or None.
    hidden: what forward() gave, [N, hidden]; labels: [N]. Differentiable, also inside Megatron's schedule. The logits
    of at most `chunk` rows exist at a time, forward and backward."""
    gpt = unwrap_model(model)
    tied = gpt.share_embeddings_and_output_weights
    weight = gpt.shared_embedding_or_output_weight() if tied else gpt.output_layer.weight
    padded = max(0, (mpu.get_tensor_model_parallel_rank() + 1) * weight.size(0) - gpt.true_vocab_size)

    def rows(hidden, labels):
        logits = _Logits.apply(hidden, weight).div_(temperature)
        if padded:  # rows that only fill up the tensor parallel split have logit 0, but no part in the softmax
            logits[:, -padded:] = -1e30  # finite: 0 x inf would be NaN
        return _LabelLogprob.apply(logits, labels)

    hidden = copy_to_tensor_model_parallel_region(hidden)  # backward: the sum over the ranks' parts of the vocabulary
    if torch.is_grad_enabled():
        # reentrant: each chunk's weight gradient reaches the fp32 buffer by itself, not as a sum in bf16
        parts = [checkpoint(rows, h, l, use_reentrant=True, preserve_rng_state=False)
                 for h, l in zip(hidden.split(chunk), labels.split(chunk))]
    else:
        parts = [rows(h, l) for h, l in zip(hidden.split(chunk), labels.split(chunk))]
    logp, ent = (torch.cat(column) for column in zip(*parts))
    return logp, ent if entropy else None


# ---- forward and backward through the pipeline ----------------------------------------------------------------------
def run(models, packed, loss_func, forward_only=False):
    """One pass over micro-batches through Megatron's schedule.
    models: [ddp], or [model] when forward_only. packed: [PackedBatch], alike on the ranks of a model replica.
    loss_func(hidden [N, hidden], index of the micro-batch) -> (loss, metrics): a scalar that is differentiated as it
    is, and anything. Returns the list of metrics on the last pipeline stage, [] elsewhere. With forward_only nothing
    is differentiated, and the list has whatever loss_func returned."""
    if not packed:
        raise ValueError("run: no micro-batches; each data parallel rank needs at least one")

    def loss_of(index, hidden, non_loss_data=False):
        result = loss_func(hidden, index)
        if non_loss_data:
            return result
        loss, metrics = result
        return loss, torch.zeros((), dtype=torch.int), metrics  # three: two would be divided by the micro-batches

    def forward_step(batches, model):
        index, batch = next(batches)
        return forward(model, batch), functools.partial(loss_of, index)

    with torch.no_grad() if forward_only else nullcontext():
        return get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter(enumerate(packed)), model=models,
            num_microbatches=len(packed), seq_length=packed[0].ids.size(1), micro_batch_size=1,  # a hint: see
            forward_only=forward_only, collect_non_loss_data=forward_only)                       # variable_seq_lengths
