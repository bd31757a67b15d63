"""Capture: ``capture(fn)`` records the local operations of a function on DTensors and replays them. See docs/capture.md."""

from .captured_function import Captured, CaptureInfo, capture

__all__ = ["CaptureInfo", "Captured", "capture"]
