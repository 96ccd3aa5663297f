"""Weights clamped in a block that edits."""

import torch
from torch import nn

from recipes.shared import gather


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
    engine.backward(engine(ids).logsumexp(-1).mean())
    engine.step()
    with gather.edit(engine.module.parameters()):
        for parameter in engine.module.parameters():
            parameter.data.clamp_(-1, 1)
