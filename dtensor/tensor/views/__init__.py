"""Views whose elements are not in their base's local, and what is written to them."""
