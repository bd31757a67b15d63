"""Interoperation with torch: patches and registrations that make torch's own tools accept DTensors.

``patch_catalog`` lists them.
"""
