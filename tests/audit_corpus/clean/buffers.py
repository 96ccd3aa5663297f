"""Buffers are whole at every stage: they are read, edited and copied."""

import copy

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, ids):
        self.seen.index_add_(0, ids.flatten(), torch.ones(ids.numel()))
        return self.norm(self.embed(ids).flatten(0, 1))


def build():
    return Net()


def step(engine, ids):
    loss = engine(ids).logsumexp(-1).mean()
    engine.backward(loss)
    engine.step()


def after(engine, folder):
    engine.module.seen.zero_()
    return copy.deepcopy(engine.module.norm.running_mean), engine.module.seen.numel()
