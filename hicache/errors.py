"""What goes wrong in the host cache, in words for the user."""


class HostPoolError(RuntimeError):
    """The host pool cannot be made or mapped; the message is one sentence with what to do."""
