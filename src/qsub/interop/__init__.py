"""Exchange with other libraries; each module stands alone and imports nothing of theirs."""
