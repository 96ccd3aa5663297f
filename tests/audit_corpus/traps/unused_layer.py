"""A layer that no forward uses."""

from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.unused = nn.Linear(8, 8)  # trap: no_gradient
        self.head = nn.Linear(8, 16)

    def forward(self, ids):
        return self.head(self.embed(ids))


def build():
    return Net()


def step(engine, ids):
    loss = engine(ids).logsumexp(-1).mean()
    engine.backward(loss)
    engine.step()
