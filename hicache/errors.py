"""What goes wrong in the host cache, in words for the user."""


class HostPoolError(RuntimeError):
    """The host pool cannot be made or mapped; the message is one sentence with what to do."""


class PrefixLoadError(RuntimeError):
    """The device refuses to load a prefix that a step counts on: the engine must not be used any more."""
