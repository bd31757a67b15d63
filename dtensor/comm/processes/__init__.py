"""Processes: the backend for ranks that are processes of ``torch.distributed``, and the dry run that imitates one of them."""
