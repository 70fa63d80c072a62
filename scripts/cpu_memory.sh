# Sourced with the environment's folder: `source scripts/cpu_memory.sh .venv`. What Linux needs for speed on CPU ranks.
#
# New pages are what costs: the C library returns every large block to the system when it is freed, and faulting its pages
# in again runs at a tenth to a sixth of a copy's speed where the host is virtual. mimalloc keeps them, in huge pages, as torch's
# caching allocator keeps a GPU's. The tunable makes copies of 16 MiB and more stream past the caches.
# docs/benchmarks.md has the figures. GPU environments do not have this mimalloc, and are left as they are.
_mimalloc=$(compgen -G "$1/lib/python3*/site-packages/cmeel.prefix/lib/libmimalloc.so" || true)
if [[ -n $_mimalloc && :${LD_PRELOAD:-}: != *mimalloc* ]]; then
    export LD_PRELOAD=$_mimalloc${LD_PRELOAD:+:$LD_PRELOAD}
    export MIMALLOC_PURGE_DELAY=${MIMALLOC_PURGE_DELAY:--1}
    export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.cpu.x86_non_temporal_threshold=0x1000000}
fi
unset _mimalloc
