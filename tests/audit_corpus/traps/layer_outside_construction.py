"""A layer is added to a model that has been partitioned."""

from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, ids):
        return self.head(self.adapter(self.embed(ids)))


def build():
    return Net()


def prepared(model):
    model.adapter = nn.Linear(8, 8)  # trap: unpartitioned


def step(engine, ids):
    loss = engine(ids).logsumexp(-1).mean()
    engine.backward(loss)
    engine.step()
