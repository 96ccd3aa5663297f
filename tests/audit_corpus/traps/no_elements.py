"""A table of no rows that is to be trained (deepspeedai/DeepSpeed#8297)."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.columns = nn.Parameter(torch.empty(0, 8))  # trap: zero_size
        self.head = nn.Linear(8, 16)

    def forward(self, ids):
        return self.head(self.embed(ids)) + self.columns.sum()


def build():
    return Net()


def step(engine, ids):
    loss = engine(ids).logsumexp(-1).mean()
    engine.backward(loss)
    engine.step()
