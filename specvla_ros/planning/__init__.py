"""Planning: what a checkpoint costs on a device, computed before anything runs. Sits above engine and models."""
