"""Several GPUs of one host: collectives, KV transfers and tensor-parallel layers, one process a GPU."""
