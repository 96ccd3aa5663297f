"""A ParameterList whose owner multiplies by each."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.steps = nn.ParameterList([nn.Parameter(torch.eye(8)) for _ in range(2)])

    def forward(self, ids):
        hidden = self.embed(ids)
        for weight in self.steps:
            hidden = hidden @ weight
        return hidden


def build():
    return Net()


def step(engine, ids):
    loss = engine(ids).logsumexp(-1).mean()
    engine.backward(loss)
    engine.step()
