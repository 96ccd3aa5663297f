"""Ranks run a layer an unequal number of times (deepspeedai/DeepSpeed#7998)."""

import torch.distributed as dist
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, ids):
        hidden = self.embed(ids)
        for _ in range(1 + dist.get_rank()):
            hidden = self.body(hidden)  # trap: order
        return self.head(hidden)


def build():
    return Net()


def step(engine, ids):
    loss = engine(ids).logsumexp(-1).mean()
    engine.backward(loss)
    engine.step()
