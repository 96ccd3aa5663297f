"""Gradients are logged: there is none, so nothing is."""

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
    engine.backward(engine(ids).logsumexp(-1).mean())
    norms = [p.grad.norm() for p in engine.module.parameters() if p.grad is not None]  # trap: gradient
    engine.step()
    return norms
