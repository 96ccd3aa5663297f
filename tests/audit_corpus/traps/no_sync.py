"""no_sync where gradients are partitioned (deepspeedai/DeepSpeed#6793)."""

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
    with engine.no_sync():  # trap: no_sync
        engine.backward(engine(ids).logsumexp(-1).mean())
    engine.step()
