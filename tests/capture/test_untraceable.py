"""What a capture cannot do without data is said in words for the person who asked."""

import threading

import pytest
import torch
from torch import Tensor, nn

import zgraph as zg

CONSTANT = torch.ones(4)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class ReadsAValue(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else x


class Selects(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[x > 0]


class ReadsAGlobal(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + CONSTANT


class Locked(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (ReadsAValue, "needs the values of a tensor, and a capture has none"),
        (Selects, r"needs the values of a tensor.*nonzero"),
        (ReadsAGlobal, "does not hold as a parameter, a buffer or an attribute"),
        (Locked, "cannot be copied, and a capture traces a copy: .*lock"),
        (Recurrent, "torch.compile captured nothing of Recurrent"),
    ],
)
def test_a_model_that_cannot_be_captured_is_told_why(model: type[nn.Module], said: str) -> None:
    with pytest.raises(zg.ModelError, match=said):
        zg.capture(model(), (torch.ones(2, 4),), world_size=2)


class ReadsTwice(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return (x * (self.linear.bias + self.linear.bias)).sum() + self.linear.weight.sum()


def test_a_parameter_that_is_added_to_itself_is_captured() -> None:
    graph = zg.capture(ReadsTwice(), (torch.ones(2, 4),), world_size=2).graph("backward")
    assert len(graph.packs()) == 1
