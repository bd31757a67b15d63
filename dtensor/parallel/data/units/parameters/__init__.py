"""Parameters: the parameters of FSDP units, their layouts, memory and collectives."""
