"""Stacks of small MLPs with hand-written gradients, in memory that is allocated once.

An `MlpStack` is K networks of one shape that are evaluated together (K = 2 for twin critics). All parameters live in
one flat tensor, all gradients in another, so that an optimiser step, a Polyak average, a gradient norm and a copy are
one call each. Activations and their gradients live in a `Tape` that is reused from update to update.

Why not autograd: at 256x256 and batch 256 on one CPU core the matrix products take about 4 ms of an update, while
fresh half-megabyte intermediates (page faults), per-tensor optimiser loops and unused weight gradients cost as much
again. Hidden layers are ReLU, the last layer is linear. Gradients equal autograd's (tested); they are written, never
accumulated. Nothing here builds a graph, and a tape serves one pass at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

_relu_backward = torch.ops.aten.threshold_backward.grad_input


@dataclass(frozen=True, slots=True, eq=False)
class Layers:
    """Parameters (or their gradients) of K MLPs, layer by layer.

    Attributes:
        weights: one [K, in, out] for each layer (inputs first: y = x @ w + b).
        biases: one [K, 1, out] for each layer.
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]

    def only(self, index: int) -> "Layers":
        """The layers of one network as a stack of one; shares memory."""
        chosen = slice(index, index + 1)
        return Layers(tuple(w[chosen] for w in self.weights), tuple(b[chosen] for b in self.biases))


class Tape:
    """Activations and gradients of one pass over B rows: what forward leaves for backward.

    Attributes:
        values: [K, B, out] of each layer, after its ReLU; the last one is the output.
        slopes: [K, B, out] of each layer, the gradient by its output before ReLU; write the last one, then `backward`.
    """

    def __init__(self, count: int, sizes: Sequence[int], rows: int, device: torch.device) -> None:
        shapes = [(count, rows, size) for size in sizes[1:]]
        self.inputs = torch.empty(0, device=device)
        self.values = tuple(torch.empty(shape, device=device) for shape in shapes)
        self.slopes = tuple(torch.empty(shape, device=device) for shape in shapes)

    def only(self, index: int) -> "Tape":
        """The same memory for a pass of one of the K networks."""
        chosen = slice(index, index + 1)
        tape = Tape.__new__(Tape)
        tape.inputs = self.inputs
        tape.values = tuple(value[chosen] for value in self.values)
        tape.slopes = tuple(slope[chosen] for slope in self.slopes)
        return tape


def forward(layers: Layers, inputs: Tensor, tape: Tape) -> Tensor:
    """Evaluate K networks on the same B rows.

    Args:
        layers: the parameters.
        inputs: float32 [B, in]; kept by reference for `backward`.
        tape: takes the activations.

    Returns:
        [K, B, out], the last of `tape.values`.
    """
    count, last = layers.weights[0].shape[0], len(layers.weights) - 1
    tape.inputs = value = inputs.unsqueeze(0).expand(count, -1, -1)
    for index, (weight, bias) in enumerate(zip(layers.weights, layers.biases, strict=True)):
        # The slopes of the layer below are written by `backward` only: free as scratch until then.
        value = _affine(value, weight, bias, tape.values[index], tape.slopes[index - 1] if index else None)
        if index < last:
            value.relu_()
    return value


def backward(layers: Layers, tape: Tape, gradients: Layers | None) -> None:
    """Carry `tape.slopes[-1]` back to the first layer.

    Args:
        layers: the parameters that `forward` used.
        tape: as `forward` left it, with the gradient by the output written to `slopes[-1]`.
        gradients: overwritten with the parameter gradients; None skips them (gradient by the input only).
    """
    for index in range(len(layers.weights) - 1, -1, -1):
        slope = tape.slopes[index]
        if gradients is not None:
            value, scratch = (tape.values[index - 1], tape.slopes[index - 1]) if index else (tape.inputs, None)
            _outer(value, slope, gradients.weights[index], scratch)
            torch.sum(slope, 1, True, out=gradients.biases[index])
        if index:
            below = tape.slopes[index - 1]
            _backproject(slope, layers.weights[index], below)
            _relu_backward(below, tape.values[index - 1], 0, grad_input=below)


def input_slope(layers: Layers, tape: Tape, first_column: int) -> Tensor:
    """After `backward`: the gradient by the input columns from `first_column` on, [K, B, in − first_column]."""
    return torch.bmm(tape.slopes[0], layers.weights[0][:, first_column:].transpose(1, 2))


def _affine(value: Tensor, weight: Tensor, bias: Tensor, out: Tensor, scratch: Tensor | None) -> Tensor:
    """Write value [K, B, in] @ weight [K, in, out] + bias to `out`; `scratch` is [K, B, in] or None."""
    if scratch is not None and weight.shape[2] == 1:
        # A head of one number: BLAS takes twice as long for such a thin product, oneDNN ten times.
        torch.mul(value, weight.transpose(1, 2), out=scratch)
        return torch.sum(scratch, 2, True, out=out).add_(bias)
    return torch.baddbmm(bias, value, weight, out=out)


def _outer(value: Tensor, slope: Tensor, out: Tensor, scratch: Tensor | None) -> None:
    """Write valueᵀ @ slope to `out` [K, in, out]: the weight gradient; `scratch` is [K, B, in] or None."""
    if scratch is not None and slope.shape[2] == 1:
        torch.mul(value, slope, out=scratch)
        torch.sum(scratch, 1, out=out.squeeze(2))
        return
    torch.bmm(value.transpose(1, 2), slope, out=out)


def _backproject(slope: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write slope @ weightᵀ to `out` [K, B, in]: the gradient by the layer's input."""
    if slope.shape[2] == 1:
        torch.mul(slope, weight.transpose(1, 2), out=out)
    else:
        torch.bmm(slope, weight.transpose(1, 2), out=out)


class MlpStack:
    """K MLPs of one shape over one flat parameter tensor.

    Attributes:
        count: K.
        sizes: widths from input to output.
        flat: every parameter, float32 [P]; a leaf that an optimiser can take.
        gradient: every gradient, float32 [P]; also `flat.grad`.
        layers: views into `flat`.
        gradients: views into `gradient`.
    """

    def __init__(self, count: int, sizes: Sequence[int], device: torch.device) -> None:
        self.count, self.sizes, self.device = count, tuple(sizes), device
        total = sum(count * (size_in + 1) * size_out for size_in, size_out in pairwise(sizes))
        self.flat = torch.zeros(total, device=device)
        self.gradient = torch.zeros(total, device=device)
        self.flat.grad = self.gradient
        self.layers = self.views(self.flat)
        self.gradients = self.views(self.gradient)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw weights and biases from U(±1/√in), as torch.nn.Linear does, with a CPU generator."""
        for weight, bias in zip(self.layers.weights, self.layers.biases, strict=True):
            bound = weight.shape[1] ** -0.5
            for tensor in (weight, bias):
                # Drawn on the CPU, so that every device starts from the same weights.
                tensor.copy_(torch.empty(tensor.shape).uniform_(-bound, bound, generator=generator))

    def twin(self) -> "MlpStack":
        """A stack of the same shape and values, in memory of its own."""
        other = MlpStack(self.count, self.sizes, self.device)
        other.flat.copy_(self.flat)
        return other

    def tape(self, rows: int) -> Tape:
        """A new tape for passes over that many rows."""
        return Tape(self.count, self.sizes, rows, self.device)

    def views(self, flat: Tensor) -> Layers:
        """The layers in a flat tensor [P] that is laid out like ours."""
        weights, biases, at = [], [], 0
        for size_in, size_out in pairwise(self.sizes):
            end = at + self.count * size_in * size_out
            weights.append(flat[at:end].view(self.count, size_in, size_out))
            at, end = end, end + self.count * size_out
            biases.append(flat[at:end].view(self.count, 1, size_out))
            at = end
        return Layers(tuple(weights), tuple(biases))
