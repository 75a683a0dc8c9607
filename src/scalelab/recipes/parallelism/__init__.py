"""Published comparisons of parallel layouts: torchtitan, Megatron-LM and Korthikanti et al. 2022."""
