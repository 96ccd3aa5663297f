"""A second model is partitioned and never given an engine (huggingface/accelerate#1261)."""

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


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x):
        return self.body(x)  # trap: no_engine


def step(engine, ids):
    loss = engine(ids).logsumexp(-1).mean()
    engine.backward(loss)
    engine.step()


def after(engine, folder):
    with deepspeed.zero.Init(dtype=torch.float32):
        teacher = Teacher()
    with torch.no_grad():
        return teacher(torch.zeros(2, 8))
