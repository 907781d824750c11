"""The trainer: state, step and loop."""

from boost_core.train.loop import train

__all__ = ["train"]
