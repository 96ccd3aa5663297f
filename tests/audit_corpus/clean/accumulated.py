"""Two backward passes a step, without no_sync."""

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
    for number, part in enumerate(ids.chunk(2), 1):
        engine.set_gradient_accumulation_boundary(number == 2)
        engine.backward(engine(part).logsumexp(-1).mean())
    engine.step()
