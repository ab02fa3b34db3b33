"""The bookkeeping of a prefix cache: which host page holds what, and what goes next."""
