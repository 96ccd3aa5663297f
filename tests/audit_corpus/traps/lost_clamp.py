"""An edit in a gather without a modifier rank (OpenRLHF/OpenRLHF#1357)."""

import deepspeed
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
    engine.backward(loss)
    engine.step()


def after(engine, folder):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        engine.module.body.weight.data.fill_(0.5)  # trap: lost_edit
