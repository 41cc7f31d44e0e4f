"""Gradients reduced over all ranks, in shared memory inside domains and on rails between them, behind the backward pass."""

from __future__ import annotations

from a2a.gradients.reducer import GradientReducer

__all__ = ["GradientReducer"]
