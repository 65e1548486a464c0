"""Exchange with other libraries; nothing of theirs is imported but to make tensors of their classes."""
