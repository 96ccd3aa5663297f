"""A moving average through the stream of whole parameters."""

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


AVERAGE = {}


def step(engine, ids):
    engine.backward(engine(ids).logsumexp(-1).mean())
    engine.step()
    for name, parameter in gather.stream(engine.module):
        old = AVERAGE.setdefault(name, parameter.detach().clone())
        old.mul_(0.9).add_(parameter.detach(), alpha=0.1)
