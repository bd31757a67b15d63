"""An operator call and the layouts of its tensors become a plan. Pure: nothing runs."""
