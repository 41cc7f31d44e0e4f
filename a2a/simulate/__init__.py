"""A training step's communication on a described cluster, as a discrete-event timeline. All that it says is modelled."""

from __future__ import annotations

from a2a.simulate.accounts import CATEGORIES, COMPUTE, Share
from a2a.simulate.assumptions import SOURCES, Assumptions
from a2a.simulate.step import Step, simulate
from a2a.simulate.workload import MODELS, PRESETS, Job, Model, load_model

__all__ = [
    "CATEGORIES",
    "COMPUTE",
    "MODELS",
    "PRESETS",
    "SOURCES",
    "Assumptions",
    "Job",
    "Model",
    "Share",
    "Step",
    "load_model",
    "simulate",
]
