"""Generation: noise, sampler, key/value cache, scheduler and the built-in engine on megatron-core modules."""
