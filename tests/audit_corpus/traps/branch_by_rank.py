"""Ranks run different layers (deepspeedai/DeepSpeed#7998)."""

import torch.distributed as dist
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.left = nn.Linear(8, 16)
        self.right = nn.Linear(8, 16)

    def forward(self, ids):
        hidden = self.embed(ids)
        return self.left(hidden) if dist.get_rank() == 0 else self.right(hidden)  # trap: order


def build():
    return Net()


def step(engine, ids):
    loss = engine(ids).logsumexp(-1).mean()
    engine.backward(loss)
    engine.step()
