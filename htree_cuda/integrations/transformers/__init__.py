"""htree attention under models of Hugging Face transformers.

`convert`          puts it under the full-attention layers of a model.
`revert`           takes it away again.
`new_cache`        a cache for loops of one's own.
`HTreeCacheLayer`  a `TreeCache` as one layer of a cache of transformers.

Importing this module registers the attention implementation "htree_cuda" with transformers, and has `from_pretrained`
and `from_config` convert models whose configuration holds a conversion.
"""

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "htree_cuda.integrations.transformers needs transformers 5.24 or newer: pip install 'htree_cuda[hf]'"
    ) from error

from .cache import HTreeCacheLayer
from .convert import convert, new_cache, register, revert

__all__ = ["HTreeCacheLayer", "convert", "new_cache", "revert"]

register()
