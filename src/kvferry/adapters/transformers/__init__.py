"""Keep the KV cache of plain Transformers models: `StoredKV` fills the cache of `generate`."""

from kvferry.adapters.transformers.arguments import StoredKVConfig
from kvferry.adapters.transformers.stored_kv import StoredKV

__all__ = ["StoredKV", "StoredKVConfig"]
