"""A penalty on a weight is computed beside the forward (deepspeedai/DeepSpeed#930)."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, ids):
        return self.head(torch.relu(self.body(self.embed(ids))))


def build():
    return Net()


def step(engine, ids):
    loss = engine(ids).logsumexp(-1).mean()
    loss = loss + 0.1 * engine.module.head.weight.pow(2).sum()  # trap: read
    engine.backward(loss)
    engine.step()
