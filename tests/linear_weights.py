"""The linear matrices of all layers of a model, counted for the tests: attention, MLP, experts, router, states."""

from __future__ import annotations

from servebook.model.shape import LINEAR, ModelShape


def parameters(shape: ModelShape) -> int:
    return sum(m.parameters for m in shape.matrices if m.part in LINEAR)


def stored_bytes(shape: ModelShape) -> int:
    """With their scales."""
    return sum(m.stored_bytes for m in shape.matrices if m.part in LINEAR)


def of_norms_and_biases(shape: ModelShape) -> int:
    """Parameters that are in no matrix: norms, biases, convolutions."""
    return sum(m.parameters for m in shape.matrices if m.part == "small")
