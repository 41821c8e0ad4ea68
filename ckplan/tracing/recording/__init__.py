"""Record the ops, storages, saved tensors, calls and side effects of a step."""
