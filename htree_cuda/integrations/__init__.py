"""htree_cuda under other libraries. Each one is imported by name: ``import htree_cuda.integrations.transformers``."""
