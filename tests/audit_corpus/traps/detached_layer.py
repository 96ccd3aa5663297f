"""A layer whose output is detached."""

from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.gate = nn.Linear(8, 8, bias=False)  # trap: no_gradient
        self.head = nn.Linear(8, 16)

    def forward(self, ids):
        hidden = self.embed(ids)
        return self.head(hidden * self.gate(hidden).detach())


def build():
    return Net()


def step(engine, ids):
    loss = engine(ids).logsumexp(-1).mean()
    engine.backward(loss)
    engine.step()
