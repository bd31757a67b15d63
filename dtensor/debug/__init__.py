"""Debugging tools: explain, trace and limit what a program does, draw shards of a tensor, and save reports as HTML."""

from ..interop.dynamo import mark_untraced as _leave_untraced
from ..recorders.comm_mode import CommDebugMode
from .html import save_html
from .visualize import visualize_sharding

__all__ = ["CommDebugMode", "save_html", "visualize_sharding"]

_leave_untraced(__name__)
_leave_untraced("dtensor.recorders")
