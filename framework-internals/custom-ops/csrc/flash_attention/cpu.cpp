// Attention on the CPU, blocked over queries so that a block of scores stays in the cache.
