"""What scripts/gpu-check runs: the SGLang plugin judged on a machine with GPUs, by numbers."""
