"""PPO's critic: a second Megatron GPT whose value head says what reward is still to come, with an optimizer of its own.

The head is one linear layer on the hidden states that the policy's vocabulary head would take: the value at a token is that
before it was sampled. It starts at 0, alike on all ranks, and computes in fp32.
"""

import argparse
import os
from dataclasses import dataclass

import model   # before megatron

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model

import rank_state
from loss import value_loss


@dataclass
class Critic:
    network: DistributedDataParallel
    optimizer: object
    scheduler: object
    value_clip: float


def make_critic(hf, args):
    """Weights of --critic-load; all flags of the optimizer are the policy's, but for --critic-lr."""
    network = model.build_model(hf, args)
    model.load_weights(network, hf, args.critic_load)
    gpt = unwrap_model(network)
    if gpt.post_process:
        like = next(gpt.parameters())
        gpt.value_head = torch.nn.Linear(hf.hidden_size, 1, device=like.device, dtype=like.dtype)
        torch.nn.init.zeros_(gpt.value_head.weight)
        torch.nn.init.zeros_(gpt.value_head.bias)
    return Critic(*model.wrap(network, argparse.Namespace(**{**vars(args), "lr": args.critic_lr})), args.value_clip)


def head(critic, hidden):
    layer = unwrap_model(critic.network).value_head
    return F.linear(hidden.float(), layer.weight.float(), layer.bias.float())[:, 0]


def predict(critic, packs):
    """The values of each micro-batch's response tokens: list of [N] on the last pipeline stage, [] elsewhere."""
    return model.run([critic.network], packs, lambda hidden, i: head(critic, hidden), forward_only=True)


def update(critic, packs, columns):
    """One optimizer step. columns: of each micro-batch, with old_value and return. Returns (the micro-batches' sums, norm)."""
    critic.network.zero_grad_buffer()
    critic.optimizer.zero_grad()

    def objective(hidden, i):
        c, values = columns[i], head(critic, hidden)
        value, clipped = value_loss(values, c["old_value"], c["return"], critic.value_clip)
        loss, mask = (torch.where(c["mask"] > 0, value, 0.0) * c["weight"]).sum(), (c["mask"] > 0).double()
        sums = {"value_loss": loss, "value_clip_frac": (clipped * mask).sum(), "value": (values * mask).sum(),
                "return": (c["return"] * mask).sum()}
        return loss, {name: x.detach().double() for name, x in sums.items()}

    sums = model.run([critic.network], packs, objective)
    ok, norm, _ = critic.optimizer.step()
    if not ok:
        raise RuntimeError("the critic's gradient is not finite: the optimizer refused the step")
    critic.scheduler.step(increment=1)
    return sums, float(norm)


def save(critic, folder, rank):
    return rank_state.save(os.path.join(folder, f"critic_{rank:05d}.pt"), critic.network, critic.optimizer, critic.scheduler)


def load(critic, folder, rank, hf):
    rank_state.load(os.path.join(folder, f"critic_{rank:05d}.pt"), critic.network, critic.optimizer, critic.scheduler, hf)
