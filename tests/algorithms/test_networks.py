import pytest
import torch
from torch import Tensor

from clawq.algorithms.networks import Layers, MlpStack, backward, forward, input_slope

CPU = torch.device("cpu")


def make_stack(count: int, sizes: tuple[int, ...], seed: int = 0) -> MlpStack:
    stack = MlpStack(count, sizes, CPU)
    stack.initialise(torch.Generator().manual_seed(seed))
    return stack


def autograd(layers: Layers, inputs: Tensor, slope: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
    """Output, gradients of weights and biases in turn, and the input's gradient, all by autograd."""
    parameters = [t.clone().requires_grad_() for pair in zip(layers.weights, layers.biases, strict=True) for t in pair]
    leaf = inputs.clone().requires_grad_()
    value = leaf.expand(layers.weights[0].shape[0], -1, -1)
    for index in range(0, len(parameters), 2):
        value = value @ parameters[index] + parameters[index + 1]
        if index < len(parameters) - 2:
            value = value.relu()
    gradients = torch.autograd.grad(value, [*parameters, leaf], slope)
    return value.detach(), list(gradients[:-1]), gradients[-1]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(5, 7, 6, 1), (5, 7, 4), (3, 2)])
def test_values_and_gradients_equal_autograd(count: int, sizes: tuple[int, ...]) -> None:
    stack = make_stack(count, sizes)
    inputs, slope = torch.randn(11, sizes[0]), torch.randn(count, 11, sizes[-1])
    value, gradients, by_input = autograd(stack.layers, inputs, slope)

    tape = stack.tape(11)
    torch.testing.assert_close(forward(stack.layers, inputs, tape), value)
    tape.slopes[-1].copy_(slope)
    stack.gradient.fill_(float("nan"))  # backward must overwrite, not accumulate
    backward(stack.layers, tape, stack.gradients)
    mine = [t for pair in zip(stack.gradients.weights, stack.gradients.biases, strict=True) for t in pair]
    for got, expected in zip(mine, gradients, strict=True):
        torch.testing.assert_close(got, expected)
    torch.testing.assert_close(input_slope(stack.layers, tape, 0).sum(0), by_input)
    torch.testing.assert_close(input_slope(stack.layers, tape, 1).sum(0), by_input[:, 1:])


def test_one_network_of_a_stack_is_evaluated_in_the_same_memory() -> None:
    stack = make_stack(2, (4, 8, 1))
    inputs = torch.randn(6, 4)
    both = forward(stack.layers, inputs, stack.tape(6)).clone()
    tape = stack.tape(6)
    alone = forward(stack.layers.only(1), inputs, tape.only(1))
    torch.testing.assert_close(alone[0], both[1])
    assert alone.data_ptr() == tape.values[-1][1].data_ptr()


def test_input_gradient_alone_leaves_parameter_gradients_untouched() -> None:
    stack = make_stack(1, (4, 8, 1))
    stack.gradient.fill_(3.0)
    tape = stack.tape(6)
    forward(stack.layers, torch.randn(6, 4), tape)
    tape.slopes[-1].fill_(1.0)
    backward(stack.layers, tape, None)
    assert (stack.gradient == 3.0).all()


def test_inputs_may_be_a_strided_view() -> None:
    stack = make_stack(2, (4, 8, 2))
    wide = torch.randn(6, 9)
    expected = forward(stack.layers, wide[:, :4].contiguous(), stack.tape(6)).clone()
    assert torch.equal(forward(stack.layers, wide[:, :4], stack.tape(6)), expected)


def test_all_parameters_live_in_the_flat_tensor_without_overlap() -> None:
    stack = make_stack(2, (3, 5, 2))
    everything = [*stack.layers.weights, *stack.layers.biases]
    assert sum(t.numel() for t in everything) == stack.flat.numel()
    for number, tensor in enumerate(everything, start=1):
        tensor.fill_(float(number))
    for number, tensor in enumerate(everything, start=1):
        assert (tensor == number).all()


def test_members_start_different_and_within_the_bounds() -> None:
    stack = make_stack(2, (16, 32, 1))
    assert not torch.equal(stack.layers.weights[0][0], stack.layers.weights[0][1])
    assert stack.layers.weights[0].abs().max() <= 16**-0.5
    assert stack.layers.weights[1].abs().max() <= 32**-0.5
    assert stack.layers.weights[0].std() == pytest.approx(16**-0.5 / 3**0.5, rel=0.1)


def test_a_twin_is_equal_and_shares_nothing() -> None:
    stack = make_stack(2, (3, 5, 2))
    twin = stack.twin()
    assert torch.equal(twin.flat, stack.flat)
    twin.flat.add_(1.0)
    assert not torch.equal(twin.flat, stack.flat)
