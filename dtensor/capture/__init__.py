"""``capture(fn)``: the DTensors of a function erased at run time. See docs/capture.md."""

from .captured_function import Captured, CaptureInfo, capture

__all__ = ["CaptureInfo", "Captured", "capture"]
