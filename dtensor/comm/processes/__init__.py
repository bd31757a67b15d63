"""Processes: the backend for ranks that are processes of ``torch.distributed``."""
