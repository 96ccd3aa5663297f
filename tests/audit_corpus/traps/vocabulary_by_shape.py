"""The vocabulary is read off the embedding."""

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
    rows = engine.module.embed.weight.shape[0]  # trap: size
    engine.backward(engine(ids % max(rows, 1)).logsumexp(-1).mean())
    engine.step()
