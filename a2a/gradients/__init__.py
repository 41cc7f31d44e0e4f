"""Gradients reduced over all ranks behind the backward pass: in shared memory inside domains, on rails between them."""

from __future__ import annotations

from a2a.gradients.reducer import GradientReducer

__all__ = ["GradientReducer"]
