"""Units: modules that ``fully_shard`` and ``replicate`` made into FSDP units, their parameters and their passes."""
