"""kvferry as a storage back end of SGLang's HiCache.

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "kvferry",
        "module_path": "kvferry.adapters.sglang", "class_name": "KVFerryStorage",
        "interface_v1": 1, "store": "file:///var/cache/kvferry?max_bytes=200GiB"}'

SGLang copies between the GPU and host memory. kvferry stores pages of that memory, and verifies
them when they come back. Importing this imports SGLang. `docs/sglang.md` has the options.
"""

from kvferry.adapters.sglang.storage import KVFerryStorage

__all__ = ["KVFerryStorage"]
