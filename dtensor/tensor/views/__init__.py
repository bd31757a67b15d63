"""Views of DTensors: lazy views, with elements that are not in the base's local tensor, and writes to them."""
